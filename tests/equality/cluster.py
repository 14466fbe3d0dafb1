"""Real processes on loopback for tests: a router and instances started by `pd launch`, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 120.0
STOP_S = 10.0


def free_port() -> int:
    """Below what the kernel hands out: no connection takes it between here and its server's start."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port among a hundred between 10000 and 32000")


@dataclass
class Cluster:
    """Processes of one model. `logs` has a file a process; it is shown when a start fails."""

    model: Path
    logs: Path
    common: tuple[str, ...] = ()
    http: int = field(default_factory=free_port)
    meeting: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def launch(self, role: str, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start one process group. Router options differ from an instance's; `options` win over what is common."""
        line = [sys.executable, "-m", "pd", "launch", "--role", role, "--model", str(self.model)]
        line += ["--router", f"tcp://127.0.0.1:{self.meeting}"]
        line += ["--port", str(self.http)] if role == "router" else ["--name", name, *self.common]
        line += options
        with open(self.logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(line, stderr=log, stdout=log, start_new_session=True)
        self.processes[name] = process
        return process

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self.get("/ready")[0] == 200:
                    return
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended with {process.returncode}:\n{self.tail(name)}"
            time.sleep(0.1)
        raise AssertionError("not ready:\n" + "\n".join(self.tail(name) for name in self.processes))

    def tail(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()[-3000:]

    def get(self, path: str) -> tuple[int, bytes]:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        status, answer = self._ask(request, timeout_s)
        return status, json.loads(answer)

    def generate(self, prompt: list[int], num_tokens: int, **sampling: Any) -> list[int]:
        """Token ids of an answer of exactly `num_tokens`."""
        body = {
            "model": self.model.name,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": 0,
        }
        status, answer = self.post("/v1/completions", body | sampling)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == num_tokens
        return list(answer["choices"][0]["token_ids"])

    def generate_all(self, prompts: list[list[int]], num_tokens: int, **sampling: Any) -> list[list[int]]:
        """All at once, each a request of its own."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, num_tokens, **sampling), prompts))

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/state")[1]))

    def wait_idle(self, timeout_s: float = 15) -> dict[str, Any]:
        """Until no request is open and no instance runs one; then the state, with every page free if it comes to that.

        The last pages of a request come back after its end: what a peer may still read or write is held until it says.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state()
            busy = [i for i in state["instances"] if i["num_running"] or i["num_waiting"] or i["num_assigned"]]
            is_over = time.monotonic() >= deadline
            is_free = all(i["num_free_pages"] == i["num_pages"] for i in state["instances"])
            if not busy and not any(state["requests"].values()) and (is_free or is_over):
                return state
            assert not is_over, f"not idle after {timeout_s} s: {state}"
            time.sleep(0.1)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for name, process in self.processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise AssertionError(f"{name} did not end in {STOP_S} s:\n{self.tail(name)}") from None

    def _ask(self, request: urllib.request.Request, timeout_s: float = 10) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    try:
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def apart(
    model: Path,
    logs: Path,
    *,
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    router: tuple[str, ...] = (),
    common: tuple[str, ...] = (),
) -> Iterator[Cluster]:
    """One prefill and one decode instance behind a router, ready."""
    logs.mkdir(parents=True, exist_ok=True)
    with running(Cluster(model, logs, common)) as cluster:
        cluster.launch("router", "router", *router)
        cluster.launch("prefill", "prefill", *prefill)
        cluster.launch("decode", "decode", *decode)
        cluster.wait_ready()
        yield cluster


@contextlib.contextmanager
def together(model: Path, logs: Path, *, common: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """One colocated instance behind a router, ready: the baseline."""
    logs.mkdir(parents=True, exist_ok=True)
    with running(Cluster(model, logs, common)) as cluster:
        cluster.launch("router", "router")
        cluster.launch("colocated", "colocated")
        cluster.wait_ready()
        yield cluster
