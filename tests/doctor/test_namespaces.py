"""Two hosts that are network namespaces of this one: each fault put between them is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

HERE, THERE = "10.77.31.1", "10.77.31.2"
LEFT, RIGHT = f"pdl{os.getpid()}", f"pdr{os.getpid()}"
PORT = 8590


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def inside(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


def run(namespace: str, *command: str) -> None:
    done = subprocess.run(inside(namespace, *command), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"the kernel refuses `{' '.join(command)}`: {done.stderr.strip()}"


@pytest.fixture(scope="module")
def pair() -> Iterator[None]:
    """Two namespaces and a wire."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root alone, and pd doctor's checks of two hosts need two")
    if shutil.which("ip") is None:
        pytest.skip("no `ip` here: install iproute2")
    try:
        ip("netns", "add", LEFT)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", RIGHT)
        ip("link", "add", "wire", "netns", LEFT, "type", "veth", "peer", "name", "wire", "netns", RIGHT)
        for namespace, address in ((LEFT, HERE), (RIGHT, THERE)):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", namespace, "link", "set", "wire", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield
    finally:
        for namespace in (LEFT, RIGHT):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=20, check=False)


@pytest.fixture(scope="module")
def served(pair: None) -> Iterator[None]:
    """`pd doctor --serve` on the right."""
    command = inside(RIGHT, sys.executable, "-m", "pd", "doctor", "--serve", "--host", THERE)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    assert process.stdout is not None
    first = process.stdout.readline()
    watchdog.cancel()
    assert first.startswith(f"serving on {THERE}:{PORT}"), first
    yield
    process.kill()
    process.wait()


def visit(*checks: str) -> dict[str, tuple[str, str]]:
    """Check -> status and what was read."""
    command = [sys.executable, "-m", "pd", "doctor", "--peer", THERE, "--json", "--only", ",".join(checks)]
    done = subprocess.run(inside(LEFT, *command), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    return {c["check"]: (c["status"], c["read"]) for c in json.loads(done.stdout)["checks"]}


def test_nothing_is_wrong_with_a_plain_wire(served: None) -> None:
    found = visit("peer.reach", "peer.versions", "peer.ports", "peer.clock", "peer.mtu", "peer.tcp")
    assert {name: status for name, (status, _) in found.items() if status == "FAIL"} == {}
    assert found["peer.mtu"] == ("PASS", "1500 bytes pass uncut both ways")
    assert "256 MiB" in found["peer.tcp"][1]


def test_unequal_mtus_are_found(served: None) -> None:
    ip("-n", LEFT, "link", "set", "wire", "mtu", "9000")
    try:
        assert visit("peer.mtu")["peer.mtu"] == ("FAIL", "9000 here, 1500 there")
    finally:
        ip("-n", LEFT, "link", "set", "wire", "mtu", "1500")


def test_a_rate_limit_is_found(served: None) -> None:
    run(LEFT, "tc", "qdisc", "add", "dev", "wire", "root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms")
    try:
        status, read = visit("peer.tcp")["peer.tcp"]
    finally:
        run(LEFT, "tc", "qdisc", "del", "dev", "wire", "root")
    assert status == "WARN" and "1% of the link's" in read, read


def test_blocked_ports_are_found(served: None) -> None:
    """A policy rule that swallows what comes in for any port but the doctor's; it must stand before the local table."""
    run(RIGHT, "ip", "rule", "add", "pref", "100", "lookup", "local")
    run(RIGHT, "ip", "rule", "del", "pref", "0")
    rule = ("iif", "wire", "ipproto", "tcp", "dport", "20000-65534", "blackhole", "pref", "10")
    run(RIGHT, "ip", "rule", "add", *rule)
    try:
        status, read = visit("peer.ports")["peer.ports"]
    finally:
        run(RIGHT, "ip", "rule", "del", "pref", "10")
    assert status == "FAIL" and "firewall" in read, read


def test_nobody_at_the_port_is_found(pair: None) -> None:
    command = [sys.executable, "-m", "pd", "doctor", "--peer", f"{THERE}:1", "--json"]
    done = subprocess.run(inside(LEFT, *command), capture_output=True, text=True, timeout=60, check=False)
    checks = json.loads(done.stdout)["checks"]
    assert done.returncode == 1
    assert (checks[0]["check"], checks[0]["status"]) == ("peer.reach", "FAIL")
    assert "refused" in checks[0]["read"]
