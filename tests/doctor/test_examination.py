"""Running checks: one that breaks is one failed check; names select; results are shown and told."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from pd.doctor.catalog import CHECKS, HEADINGS
from pd.doctor.check import Check, Examined, examine, select
from pd.doctor.command import as_json, doctor
from pd.doctor.machine import Machine
from pd.doctor.options import DoctorOptions
from pd.doctor.recorded import Recorded, Recording
from pd.doctor.report import group_report, summary
from pd.doctor.result import Result, Status, fail, passed, skip, warn
from pd.runtime.config import ConfigError

EMPTY = Recorded(Recording(about="", sources=()))


def divide(machine: Machine) -> Result:
    """Divides."""
    return passed(str(1 // 0))


def made(result: Result, name: str = "rdma.x", title: str = "X") -> Examined:
    return Examined(Check(name, title, divide), result, 0.001)


def shown(examined: list[Examined], *, width: int = 80, verbose: bool = False) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(group_report("rdma", examined, verbose=verbose))
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_a_check_that_breaks_is_one_failed_check() -> None:
    result = examine(Check("machine.odd", "Odd", divide), EMPTY).result
    assert result.status is Status.FAIL
    assert "ZeroDivisionError" in result.read and "divide" in result.details[0]


def test_every_check_bears_a_machine_with_nothing_on_it() -> None:
    broken = [c.id for c in CHECKS if "the check itself failed" in examine(c, EMPTY).result.read]
    assert broken == []


def test_checks_have_unique_names_known_groups_and_explanations() -> None:
    assert len({c.id for c in CHECKS}) == len(CHECKS)
    assert {c.group for c in CHECKS} <= HEADINGS.keys()
    assert [c.id for c in CHECKS if len(c.explanation.splitlines()) < 3] == []


def test_only_takes_groups_and_checks() -> None:
    chosen = select(CHECKS, ["amd", "rdma.gid"])
    assert {c.group for c in chosen} == {"amd", "rdma"} and "rdma.gid" in {c.id for c in chosen}
    assert [c.id for c in chosen if c.group == "rdma"] == ["rdma.gid"]


def test_gpu_means_the_groups_of_both_vendors(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(DoctorOptions(only="gpu", json=True))
    asked = {check["check"].partition(".")[0] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert asked == {"nvidia", "amd"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DoctorOptions(only="nope"), "nope"),
        (DoctorOptions(only="nope"), "peer .with --peer., model .with --model."),
        (DoctorOptions(explain="rdma.nope"), "rdma.nope"),
        (DoctorOptions(peer="host:port:x"), "--peer"),
        (DoctorOptions(peer="host:99999"), "--peer"),
        (DoctorOptions(model="x", role="router"), "--role"),
        (DoctorOptions(role="prefill", tp=2), "--tp is of --model, which is not given"),
        (DoctorOptions(host="0.0.0.0"), "--host is of --serve, which is not given"),
        (DoctorOptions(serve=True, peer="host"), "exclude each other"),
        (DoctorOptions(only="machine,peer.tcp"), "--only peer.tcp needs --peer"),
        (DoctorOptions(model="x", tp=0), "--tp"),
        (DoctorOptions(serve=True, host="192.0.2.1", only="machine"), "cannot listen"),
    ],
)
def test_wrong_use_is_a_config_error(options: DoctorOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        doctor(options)


def test_what_is_wrong_is_shown_with_why_fix_and_details() -> None:
    text = shown([made(fail("8 MiB", "Too little.", "ulimit -l unlimited", "soft 8", "hard 8"))])
    for part in (" FAIL  X", "8 MiB", "why Too little.", "fix ulimit -l unlimited", "soft 8", "--explain rdma.x"):
        assert part in text


def test_details_of_what_passed_are_for_verbose() -> None:
    examined = [made(passed("fine", "the detail"))]
    assert "the detail" not in shown(examined)
    assert "the detail" in shown(examined, verbose=True)


def test_checks_skipped_for_one_reason_share_a_line() -> None:
    examined = [made(skip("no RDMA"), f"rdma.{n}") for n in "abc"] + [made(skip("other"), "rdma.d")]
    text = shown(examined)
    assert "3 checks" in text and "no RDMA (a, b, c)" in text and "other" in text
    assert shown(examined, verbose=True).count("no RDMA") == 3


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_none_is_coloured_without_one(width: int) -> None:
    long = "a sentence that goes on and on " * 8
    text = shown([made(warn(long, long, "/a/path" * 30 + "\n" + long, long))], width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([passed("")], "Ready: 1 passed, 0 warnings, 0 failed, 0 skipped"),
        ([passed(""), warn("", "", ""), skip("")], "Ready, with warnings: 1 passed, 1 warning, 0 failed, 1 skipped"),
        ([fail("", "", "")], "Not ready: 0 passed, 0 warnings, 1 failed"),
    ],
)
def test_the_summary_counts(results: list[Result], words: str) -> None:
    assert words in summary([made(r) for r in results], 1.0).plain


def test_json_holds_everything_and_says_whether_ready() -> None:
    told = json.loads(as_json([made(fail("r", "m", "f", "d"))]))
    assert told["ready"] is False
    (check,) = told["checks"]
    assert {k: check[k] for k in ("check", "status", "read", "means", "fix", "details")} == {
        "check": "rdma.x",
        "status": "FAIL",
        "read": "r",
        "means": "m",
        "fix": "f",
        "details": ["d"],
    }


def test_explaining_a_check_exits_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(DoctorOptions(explain="peer.mtu")) == 0
    assert "fragmented" in capsys.readouterr().out
