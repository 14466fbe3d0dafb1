"""The supervisor over plain child programs: none outlives it, a dead one comes back, a misconfigured one ends all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pd import cli_layout
from pd.runtime.roles import supervisor

ROUTER = """
import http.server, logging, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{}')
    def log_message(self, *_): pass
http.server.HTTPServer(('127.0.0.1', PORT), Answer).serve_forever()
"""
DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'
child = subprocess.Popen([sys.executable, '-c', deaf])
print('deaf', os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
POLITE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print('12:00:00 polite lives', os.getpid(), flush=True)
time.sleep(600)
"""
CHATTY = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    print('chatty talks', flush=True)
    time.sleep(0.02)
"""
MISTAKEN = "import sys; print('error: no such thing', flush=True); sys.exit(2)"
CRASHING = "raise SystemExit(1)"


class Serve:
    """A supervisor in a process of its own, its output in a file that can be awaited."""

    def __init__(self, folder: Path, *, restart: bool = True, output: int | None = None, **programs: str) -> None:
        """`output`: where to write instead of a file."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        children = {name: program.replace("PORT", str(port)) for name, program in programs.items()}
        script = (
            "import sys\n"
            "from pd.runtime.roles.child import Child\n"
            "from pd.runtime.roles.supervisor import ServeConfig, run\n"
            f"children = {children!r}\n"
            "config = ServeConfig(children=tuple(Child(name=name, says=('', '', ''), "
            "command=(sys.executable, '-c', program)) for name, program in children.items()), "
            f"host='127.0.0.1', port={port}, model='m', restart={restart})\n"
            "sys.exit(run(config))\n"
        )
        self._log = folder / "log"
        with self._log.open("wb") as log:
            out = log if output is None else output
            self.process = subprocess.Popen([sys.executable, "-c", script], stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until(self, text: str, *, count: int = 1) -> str:
        """Everything said when `text` has been said `count` times."""
        deadline = time.monotonic() + 30
        while self.output.count(text) < count:
            assert self.process.poll() is None or self.output.count(text) >= count, self.output
            assert time.monotonic() < deadline, f"{text!r} was not said {count} times in:\n{self.output}"
            time.sleep(0.02)
        return self.output

    def pids(self, mark: str) -> list[int]:
        """The numbers on the last line that holds `mark`."""
        line = [line for line in self.output.splitlines() if mark in line][-1]
        return [int(word) for word in line.split() if word.isdigit()]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def serves() -> Iterator[list[Serve]]:
    """Whatever a test put here is ended, with all its processes."""
    made: list[Serve] = []
    yield made
    for serve in made:
        if serve.process.poll() is None:
            family = serve.family()
            serve.process.kill()
            serve.process.wait()
            for process in family:
                if process.is_running():
                    process.kill()


def runs(pid: int) -> bool:
    """False also for a zombie: the init of a container may not reap an orphan that was killed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_end_within_5_s_even_the_deaf_and_their_children(
    tmp_path: Path, serves: list[Serve], number: signal.Signals
) -> None:
    serve = Serve(tmp_path, router=ROUTER, deaf=DEAF, polite=POLITE)
    serves.append(serve)
    serve.until("stop   Ctrl-C")
    serve.until("deaf |")
    family = [process.pid for process in serve.family()]
    assert len(family) == 4
    began = time.monotonic()
    serve.process.send_signal(number)
    assert serve.process.wait(timeout=10) == 0
    assert time.monotonic() - began < 5.0
    assert gone(family, within_s=0.2)


def test_without_the_deaf_all_end_at_once(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, router=ROUTER, polite=POLITE)
    serves.append(serve)
    serve.until("stop   Ctrl-C")
    began = time.monotonic()
    serve.process.terminate()
    assert serve.process.wait(timeout=10) == 0
    assert time.monotonic() - began < 2.0


def test_a_second_signal_ends_all_at_once(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, router=ROUTER, deaf=DEAF)
    serves.append(serve)
    serve.until("deaf |")
    serve.process.terminate()
    serve.until("stopping")
    began = time.monotonic()
    serve.process.terminate()
    assert serve.process.wait(timeout=10) == 0
    assert time.monotonic() - began < 2.0


def test_a_killed_child_is_started_again_and_leaves_no_orphan(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, router=ROUTER, deaf=DEAF)
    serves.append(serve)
    serve.until("stop   Ctrl-C")
    serve.until("deaf | deaf")
    leader, follower = serve.pids("deaf | deaf")
    os.kill(leader, signal.SIGKILL)
    serve.until("deaf was ended by SIGKILL; starting it again in 0.5 s")
    assert gone([leader, follower], within_s=1.0)
    serve.until("deaf | deaf", count=2)
    assert serve.pids("deaf | deaf")[0] != leader
    assert serve.process.poll() is None


def test_a_child_that_ended_as_it_was_told_to_is_not_started_again(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, router=ROUTER, polite=POLITE)
    serves.append(serve)
    serve.until("stop   Ctrl-C")
    serve.until("polite lives")
    os.kill(serve.pids("polite lives")[-1], signal.SIGTERM)
    serve.until("polite ended as it was told to; it is not started again")
    time.sleep(0.7)  # a restart would come after 0.5 s
    assert serve.process.poll() is None
    assert serve.output.count("polite lives") == 1


@pytest.mark.parametrize("where", ["a pipe that nobody reads any more", "a disk that is full"])
def test_what_is_served_outlives_its_log(tmp_path: Path, serves: list[Serve], where: str) -> None:
    if where == "a disk that is full":
        sink = os.open("/dev/full", os.O_WRONLY)
    else:
        source, sink = os.pipe()
    serves.append(serve := Serve(tmp_path, output=sink, router=ROUTER, chatty=CHATTY))
    os.close(sink)
    if where != "a disk that is full":
        with open(source, "rb") as reader:
            assert any(b"chatty talks" in line for line in reader)
    parent = psutil.Process(serve.process.pid)
    deadline = time.monotonic() + 30
    while len(children := parent.children()) < 2:
        assert time.monotonic() < deadline, "both are started"
        time.sleep(0.02)
    time.sleep(0.5)  # and one of them talks all the time
    assert serve.process.poll() is None and {child.pid for child in parent.children()} == {c.pid for c in children}
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(10) == 0
    assert gone([child.pid for child in children], within_s=5)


def test_a_childs_own_name_is_not_said_twice(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, router=ROUTER, polite=POLITE)
    serves.append(serve)
    assert "\n12:00:00 polite lives" in "\n" + serve.until("polite lives")


def test_a_child_with_a_wrong_configuration_ends_the_whole_with_its_message(
    tmp_path: Path, serves: list[Serve]
) -> None:
    serve = Serve(tmp_path, router=ROUTER, mistaken=MISTAKEN, polite=POLITE)
    serves.append(serve)
    assert serve.process.wait(timeout=20) == 2
    assert "mistaken | error: no such thing" in serve.output
    assert "mistaken cannot start" in serve.output


def test_a_child_that_never_comes_up_is_given_up(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, router=POLITE, crashing=CRASHING)
    serves.append(serve)
    assert serve.process.wait(timeout=20) == 1
    assert serve.output.count("crashing ended with status 1; starting it again") == 2
    assert "crashing ended with status 1, 3 times before all were ready; giving up" in serve.output


def test_restart_never_ends_the_others(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, restart=False, router=ROUTER, polite=POLITE)
    serves.append(serve)
    serve.until("stop   Ctrl-C")
    family = [process.pid for process in serve.family()]
    os.kill(serve.pids("polite lives")[-1], signal.SIGKILL)
    assert serve.process.wait(timeout=10) == 1
    assert gone(family, within_s=0.2)


def test_children_are_told_to_end_when_the_supervisor_is_killed(tmp_path: Path, serves: list[Serve]) -> None:
    serve = Serve(tmp_path, router=ROUTER, polite=POLITE)
    serves.append(serve)
    serve.until("stop   Ctrl-C")
    family = [process.pid for process in serve.family()]
    serve.process.kill()
    serve.process.wait()
    assert gone(family, within_s=5.0)


def test_two_that_start_together_have_their_instances_meet_at_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither router listens yet, so the port looks free to both."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(cli_layout, "_MEMBERSHIP_PORT", port)
    one, meets_at = cli_layout._meeting()
    other, elsewhere = cli_layout._meeting()
    assert meets_at == f"tcp://127.0.0.1:{port}" != elsewhere
    one.close()
    other.close()
    again, meets_at = cli_layout._meeting()
    assert meets_at == f"tcp://127.0.0.1:{port}"
    again.close()


def test_what_is_awaited_is_what_was_asked_for() -> None:
    none = '{"ready": false, "missing": ["prefill", "decode"]}'
    assert supervisor.missing_instances(none, {"router", "colocated"}) == "a colocated instance"
    assert (
        supervisor.missing_instances(none, {"router", "prefill", "decode"})
        == "a prefill instance and a decode instance"
    )
    apart = '{"ready": false, "missing": [], "reason": "p and d cannot serve together: shm"}'
    assert supervisor.missing_instances(apart, {"prefill", "decode"}) == "p and d cannot serve together: shm"
    assert supervisor.missing_instances('{"ready": false, "missing": []}', {"prefill", "decode"}) == "instances"
