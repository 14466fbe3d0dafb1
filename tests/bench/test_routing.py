"""`pd bench router` drives the real router and others beside it, and every answer is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pd.bench.compare.shape import foreign
from pd.bench.lines import read
from pd.bench.options import RouterOptions
from pd.bench.routing import measure, servers
from pd.bench.routing.command import router
from pd.bench.routing.cpu import cpu_s
from pd.runtime.config import ConfigError
from tests.tiny import make_tiny

PROXY = f"{sys.executable} -m tests.bench.proxy {{port}} {{backend}}"


def test_our_router_and_others_are_measured_in_turns_and_who_fails_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "START_S", 6.0)
    monkeypatch.setattr(measure, "IDLE_RATE", 100.0)
    vs = [
        f"sh -c '{PROXY}; true'",  # the proxy is a child of what was started
        f"{PROXY} 40",
        "no-such-router {port} {backend}",
        "sh -c 'echo I wait; exec sleep 60' {port} {backend}",
    ]
    model, output = make_tiny("llama", tmp_path / "tiny"), tmp_path / "out.jsonl"
    options = RouterOptions(model=str(model), requests=80, streams=6, tokens=5, step_ms=2, vs=vs, output=str(output))
    assert router(options) == 1
    head, *lines = read(output)
    loads = [line for line in lines if line["kind"] == "load"]
    assert head["kind"] == "router"
    assert [
        (one["what"], one["server"], one["summary"]["num_ok"], one["summary"]["answer_tokens"]) for one in loads
    ] == [  # type: ignore[index]
        (what, server, num, num_tokens)
        for what, num, num_tokens in (("idle", 60, 60), ("requests", 80, 80), ("streams", 6, 30))
        for server in ("direct", "router", "sh", *(["tests.bench.proxy"] if what == "idle" else []))
    ]
    assert all(one["summary"]["doubts"] == {} for one in loads)  # type: ignore[index]
    for name in ("router", "sh"):
        assert sum(one["cpu_s"] for one in loads if one["server"] == name) > 0  # type: ignore[misc]
    told = " ".join(capsys.readouterr().out.split())
    for words in (
        "direct our router sh tests.bench.proxy",
        "of that added by the router",
        "tests.bench.proxy is left out: tests.bench.proxy ended with status 1 while it served: that was too much",
        "no-such-router is left out: cannot start no-such-router: No such file or directory",
        "sh 2 is left out: sh cannot serve after 6 s (/v1/completions: no connection: Connection refused): I wait",
    ):
        assert words in told, told


def test_wrong_use_is_told_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        router(RouterOptions(requests=0, step_ms=-1.0, vs=["proxy {port}", "proxy {backend}", "proxy 'x"]))
    example = "'python -m sglang_router.launch_router --port {port} --worker-urls {backend}'"
    assert str(caught.value).splitlines() == [
        "--requests is 0, must be above 0",
        "--step-ms is -1.0, must be above 0",
        f"--vs is 'proxy {{port}}': it must hold {{backend}}, or {{prefill}} and {{decode}}, as in {example}",
        f"--vs is 'proxy {{backend}}': it must hold {{port}}, as in {example}",
        '--vs is "proxy \'x": No closing quotation',
    ]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("env A=1 vllm serve {model} --port {port}", "vllm"),
        ("/opt/python3.11 -m sglang_router.launch_router --port {port}", "sglang_router.launch_router"),
        ("python3 examples/proxy.py --port {port}", "proxy.py"),
        ("/usr/bin/router -m x --port {port}", "router"),
    ],
)
def test_a_command_is_named_by_its_program(command: str, name: str) -> None:
    assert foreign(command, cores=(0,)).name == name


def test_cpu_time_is_that_of_all_processes_of_a_session_ended_ones_too() -> None:
    """A child that has ended and was waited for, and one that goes on."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(60 * go_on)"
    begin = "import subprocess, sys\ncommand = [sys.executable, '-c']\n"
    ended = f"subprocess.run([*command, {'go_on = 0;' + burn!r}])\n"
    goes_on = f"subprocess.run([*command, {'go_on = 1;' + burn!r}])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", begin + ended + goes_on], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"\n", b"\n"]
        assert 0.6 <= cpu_s(process.pid) < 2.0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
