"""This machine behind the seam: absence is no error, libraries answer from processes of their own."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pd.doctor import local
from pd.doctor.answers import Clock, Cma, Hosts, Loopback, Mooncake, Needs, Packages
from pd.doctor.local import ThisMachine, natural
from pd.doctor.machine import Access, Answer, Silence, Why

MACHINE = ThisMachine()


class Nothing(Answer, frozen=True):
    """No module of pd.doctor.ask has this name."""


def test_absence_is_an_answer(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert MACHINE.read(absent) is None and MACHINE.list(absent) == ()
    assert MACHINE.access(absent) is Access.ABSENT
    assert MACHINE.resolve(absent) is None and MACHINE.space(absent) is None
    assert MACHINE.run(absent) is None


def test_packed_files_are_unpacked_and_the_kernels_own_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.gz"
    path.write_bytes(gzip.compress(b"CONFIG_X=y\n"))
    assert MACHINE.read(str(path)) == "CONFIG_X=y"
    release = MACHINE.read("/proc/sys/kernel/osrelease")
    assert release == os.uname().release


def test_names_are_sorted_as_people_count() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "eth0"], key=natural) == ["eth0", "mlx5_2", "mlx5_10"]


def test_a_command_gives_its_status_and_both_outputs() -> None:
    output = MACHINE.run(sys.executable, "-c", "import sys; print('out'); sys.exit('err')")
    assert output is not None and (output.code, output.text) == (1, "out\nerr")


def test_a_command_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "COMMAND_S", 0.2)
    assert ThisMachine().run("sleep", "60") is None


def test_libraries_answer() -> None:
    packages, hosts, clock = MACHINE.ask(Packages), MACHINE.ask(Hosts), MACHINE.ask(Clock)
    assert isinstance(packages, Packages) and packages.versions["pd-serve"]
    assert isinstance(hosts, Hosts) and hosts.name == os.uname().nodename
    assert isinstance(clock, Clock) and clock.max_error_s > 0
    assert isinstance(MACHINE.ask(Cma), Cma)


def test_a_library_that_is_not_there_is_missing() -> None:
    answer = MACHINE.ask(Nothing)
    assert isinstance(answer, Silence) and answer.why is Why.MISSING


def test_a_question_that_raises_has_failed_and_says_so() -> None:
    answer = MACHINE.ask(Loopback, "no-such-backend")
    assert isinstance(answer, Silence) and answer.why is Why.FAILED
    assert "no-such-backend" in answer.reason


def test_a_library_that_hangs_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ASK_S", 0.01)
    answer = ThisMachine().ask(Packages)
    assert isinstance(answer, Silence) and answer.why is Why.SLOW


def test_a_library_that_crashes_has_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal, sys\nsys.stderr.write('some last words\\n')\nsys.stderr.flush()\n"
    put_library(tmp_path, code + "os.kill(os.getpid(), signal.SIGSEGV)\n", monkeypatch)
    assert ThisMachine().ask(Mooncake) == Silence(Why.CRASHED, "SIGSEGV some last words")


def test_who_is_asked_ends_with_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that hangs, and an asker that is killed meanwhile."""
    mark = tmp_path / "mark"
    code = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    put_library(tmp_path, code, monkeypatch)
    script = (
        "from pd.doctor.answers import Mooncake\nfrom pd.doctor.local import ThisMachine\nThisMachine().ask(Mooncake)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        until(lambda: mark.exists() and mark.read_text() != "")
    finally:
        process.kill()
        process.wait()
    until(lambda: not Path(f"/proc/{mark.read_text()}").exists())


def put_library(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake, as far as it matters here: importing it runs `code`."""
    (folder / "mooncake").mkdir()
    (folder / "mooncake" / "__init__.py").touch()
    (folder / "mooncake" / "engine.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_foreseen_is_answered_once() -> None:
    machine = ThisMachine()
    machine.foresee(Packages)
    assert isinstance(machine.ask(Packages), Packages)


def test_a_model_that_is_not_here_says_so(tmp_path: Path) -> None:
    answer = MACHINE.ask(Needs, str(tmp_path), "1", "16", "cpu")
    assert isinstance(answer, Needs) and "has no config.json" in answer.error
