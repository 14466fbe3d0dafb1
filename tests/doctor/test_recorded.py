"""Recorded machines: files, folders, links and differences from another machine."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pd.doctor.answers import Clock, Torch
from pd.doctor.machine import Access, Silence, Why
from pd.doctor.recorded import Recorded, load


def machine(tmp_path: Path, **entries: object) -> Recorded:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"about": "a test's", "sources": ["made up"], **entries}))
    return Recorded(load(path))


def test_braces_stand_for_each(tmp_path: Path) -> None:
    found = machine(tmp_path, files={"/sys/{a,b}/{9..11}": "x"})
    assert found.list("/sys") == ("a", "b")
    assert found.list("/sys/b") == ("9", "10", "11")
    assert found.read("/sys/a/10") == "x"


def test_links_lead_on(tmp_path: Path) -> None:
    found = machine(
        tmp_path, files={"/sys/devices/pci0/nic/vendor": "0x15b3"}, links={"/sys/class/nic": "/sys/devices/pci0/nic"}
    )
    assert found.read("/sys/class/nic/vendor") == "0x15b3"
    assert found.list("/sys/class/nic") == ("vendor",)
    assert found.resolve("/sys/class/nic") == "/sys/devices/pci0/nic"


def test_what_is_not_mentioned_is_not_there(tmp_path: Path) -> None:
    found = machine(tmp_path, access={"/dev/kfd": "denied"})
    assert found.read("/etc/hosts") is None
    assert found.access("/etc/hosts") is Access.ABSENT
    assert found.access("/dev/kfd") is Access.DENIED
    assert found.run("lspci") is None
    assert found.ask(Clock) == Silence(Why.MISSING, "No module named clock")


def test_a_silence_is_recorded_too(tmp_path: Path) -> None:
    found = machine(tmp_path, answers={"torch": {"why": "crashed", "reason": "SIGSEGV"}})
    assert found.ask(Torch) == Silence(Why.CRASHED, "SIGSEGV")


def test_a_machine_is_another_with_differences(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(
        json.dumps(
            {"about": "", "sources": [], "files": {"/a/1": "one", "/a/2": "two", "/b": "b"}, "env": {"MC_X": "1"}}
        )
    )
    found = machine(tmp_path, like="base.json", without=["/a/1", "MC_"], files={"/b": "other"})
    assert found.list("/a") == ("2",)
    assert found.read("/b") == "other"
    assert dict(found.env) == {}


def test_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(msgspec.ValidationError, match="file"):
        machine(tmp_path, file={})
