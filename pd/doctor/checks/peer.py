"""Another host, that runs `pd doctor --serve`: what differs, what passes between, and how fast."""

from __future__ import annotations

from functools import partial

from pd.doctor.answers import Loopback, Visit
from pd.doctor.check import Check
from pd.doctor.checks.transfer import busy, describe, rate
from pd.doctor.facts import Matters, differences
from pd.doctor.machine import Machine, Silence, Why
from pd.doctor.peer.path import LARGEST
from pd.doctor.peer.protocol import PORT
from pd.doctor.peer.visit import parse
from pd.doctor.readings import duration
from pd.doctor.result import Result, Status, fail, passed, skip, warn

SKEW_S = 1.0
LATENCY_S = 0.005
"""Of a round trip: a handoff needs three; above this two sites are being joined."""
RDMA_SHARE, TCP_SHARE = 0.5, 0.25
"""Of the link's rate that a backend should reach at 256 MiB. RDMA reaches 0.8 to 0.95; TCP hangs on the CPU."""
TCP_RATE = 1e9
"""Bytes a second that a TCP path reaches on any faster link; below this "something is wrong" (Dynamo's guide: 1
to 2 GB/s)."""
BACKENDS = ("tcp", "nixl", "mooncake")


def reach(machine: Machine, *, peer: str) -> Result:
    """Whether the other host's doctor answers.

    Connects to the port that `pd doctor --serve` names (8590 unless told).
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        _, port = parse(peer)
        served = "" if port == PORT else f" --port {port}"
        return fail(
            visit.read,
            "The other host's doctor does not answer.",
            f"on the other host: pd doctor --serve --host <its address>{served}; then open the port in its firewall "
            f"(sudo ufw allow {port}/tcp; cloud: the security group)",
        )
    return passed(f"{peer} answers" + (f", by way of {visit.interface}" if visit.interface else ""))


def versions(machine: Machine, *, peer: str) -> Result:
    """Versions and settings of both hosts, side by side.

    pd's wire version and nixl's must be equal, RDMA link layers too; torch and Mooncake should; kernels and
    cards may differ.
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        return visit
    found = differences(visit.here, visit.there)
    rows = tuple(f"{d.name}: {d.here} here, {d.there} there" for d in found)
    serious = [d for d in found if d.matters is Matters.YES]
    doubtful = [d for d in found if d.matters is Matters.MAYBE]
    if serious or doubtful:
        judge = fail if serious else warn
        named = [*serious, *doubtful]
        return judge(
            "; ".join(f"{d.name} {d.here} here, {d.there} there" for d in named),
            "The two will refuse each other, or not find a way to connect." if serious else "It works, untested so.",
            "install the same versions and set the same variables on both",
            *rows,
        )
    harmless = f"; {len(found)} harmless differences" if found else ""
    return passed(f"{len(visit.here) - len(found)} of {len(visit.here)} equal{harmless}", *rows)


def ports(machine: Machine, *, peer: str) -> Result:
    """Whether each host can connect to a port that the other has just opened.

    Instances take handoffs and KV on ports of the system's choice, so a firewall must let the hosts talk freely:
    "connection refused" or silence shows it.
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        return visit
    blocked = [
        f"{way}: {said}"
        for way, said in (("from here to there", visit.out), ("from there to here", visit.back))
        if said
    ]
    if blocked:
        return fail(
            "; ".join(blocked),
            "Prefill must reach decode and decode prefill, on ports that are chosen when they start.",
            "let the two hosts reach each other on ports 1024 to 65535 (sudo ufw allow from <other "
            "host>; cloud: a rule "
            "within the security group)",
        )
    return passed("fresh ports are reached both ways")


def clock(machine: Machine, *, peer: str) -> Result:
    """How far the two clocks are apart.

    From fifty round trips, the fastest one. pd compares no clocks across hosts; logs and traces do.
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        return visit
    ahead = f"theirs is {duration(abs(visit.skew_s))} {'ahead' if visit.skew_s > 0 else 'behind'}"
    if abs(visit.skew_s) > SKEW_S:
        return warn(
            ahead,
            "Serving works, but log lines and traces of the two hosts cannot be laid side by side.",
            "run chrony on both",
        )
    return passed(f"{ahead} (± {duration(visit.latency_s / 2)})")


def latency(machine: Machine, *, peer: str) -> Result:
    """The fastest of fifty round trips over TCP.

    A request's handoff takes about three; they add to the time to its first token.
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        return visit
    read = f"{duration(visit.latency_s)} a round trip"
    if visit.latency_s > LATENCY_S:
        return warn(
            read, "Each handoff waits about three of these.", "place prefill and decode in one site, on one switch"
        )
    return passed(read)


def mtu(machine: Machine, *, peer: str) -> Result:
    """The largest packet that passes uncut each way, against both interfaces' MTU.

    Sends datagrams that may not be fragmented. Unequal MTUs, or a path that drops what its ends would send, show as
    connections that open and then hang, and under RoCE as "Failed to modify QP to RTR, check mtu, gid, …".
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        return visit
    if visit.mtu_here and visit.mtu_there and visit.mtu_here != visit.mtu_there:
        least = min(visit.mtu_here, visit.mtu_there)
        return fail(
            f"{visit.mtu_here} here, {visit.mtu_there} there",
            f"Packets above {least} bytes from the one are dropped before the other: RoCE fails to "
            "connect, UDP vanishes.",
            f"sudo ip link set <interface> mtu {least} on the larger side, or raise the other (and the switches)",
            f"largest uncut packet out {visit.whole_out}, back {visit.whole_back}",
        )
    want = min(visit.mtu_here or 0, LARGEST)
    passes = min(visit.whole_out, visit.whole_back)
    if not visit.whole_out and not visit.whole_back:
        return skip("no datagram came through: UDP is blocked, so the path's MTU is unknown")
    if passes < want:
        return fail(
            f"both interfaces say {want}, but the path passes {passes} (out {visit.whole_out}, back "
            f"{visit.whole_back})",
            "Larger packets vanish on the way: connections open, then hang when much is sent.",
            f"raise the MTU of what is between, or set both ends to {passes or 1280}: sudo ip link set <interface> mtu "
            f"{passes or 1280}; or allow ICMP 'fragmentation needed'",
        )
    return passed(f"{passes} bytes pass uncut both ways")


def backend(machine: Machine, *, peer: str, name: str) -> Result:
    """A backend measured from this host into the other: seconds and GB/s for 64 KiB, 1 MiB and 256 MiB, against
    the link.

    Every byte is compared by checksum. The link's rate is what the interface (for nixl: the fastest RDMA port)
    says.
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        return visit
    answer = machine.ask(Loopback, name, peer)
    if isinstance(answer, Silence):
        if answer.why is Why.MISSING and name != "tcp":
            return skip("not installed here")
        return fail(f"{answer.why.value}: {answer.reason}", f"{name} does not work between the two.", _FIX)
    if answer.error:
        absent = "ModuleNotFoundError" in answer.error and name != "tcp"
        return (
            skip("not installed there")
            if absent
            else fail(answer.error, f"{name} does not work between the two.", _FIX)
        )
    link, floor = _expected(machine, visit, name)
    reached = rate(answer.timings[-1])
    share = f", {reached / link:.0%} of the link's {link / 1e9:.3g} GB/s" if link else ""
    read = describe(answer.timings) + share + (f"; {answer.note}" if answer.note else "")
    if reached < floor:
        return warn(
            read,
            f"Less than the {floor / 1e9:.2g} GB/s that this link should give at least{busy(machine)}.",
            "look for a rate limit, a slow hop, errors (ip -s link) and a busy CPU; see peer.mtu; "
            "for RDMA see rdma.pcie and gpudirect",
        )
    return passed(read)


_FIX = "see peer.ports and peer.mtu; software.env on both hosts; pd doctor --only transfer on each"


def _expected(machine: Machine, visit: Visit, name: str) -> tuple[float | None, float]:
    """The link's bytes a second (None: unknown), and the least that is in order."""
    rdma = min(float(side.get("RDMA rate Gbit/s", "0")) for side in (visit.here, visit.there))
    if name == "nixl" and rdma:
        return rdma / 8 * 1e9, RDMA_SHARE * rdma / 8 * 1e9
    text = machine.read(f"/sys/class/net/{visit.interface}/speed") or ""
    link = int(text) / 8 * 1e6 if text.isdigit() and int(text) > 0 else None
    return link, min(TCP_SHARE * link, TCP_RATE) if link else 0.0


def auto(machine: Machine, *, peer: str) -> Result:
    """Which backend `--transfer auto` takes between the two, and whether another was faster.

    auto is shm on one host, else tcp (LinkConfig.transfer).
    """
    visit = _visit(machine, peer)
    if isinstance(visit, Result):
        return visit
    answers = {n: machine.ask(Loopback, n, peer) for n in BACKENDS}
    rates = {n: rate(a.timings[-1]) for n, a in answers.items() if isinstance(a, Loopback) and a.timings}
    listed = tuple(f"{n}: {r / 1e9:.2g} GB/s" for n, r in rates.items())
    if "tcp" not in rates:
        return fail("auto takes tcp, which does not work", "No KV would move.", _FIX, *listed)
    best = max(rates, key=lambda n: rates[n])
    if rates[best] > 1.5 * rates["tcp"]:
        return passed(f"tcp; {best} was {rates[best] / rates['tcp']:.1f} times as fast", *listed)
    return passed("tcp, the fastest here" if best == "tcp" else "tcp, as fast as any here", *listed)


def peer_checks(peer: str) -> tuple[Check, ...]:
    """The checks of one visit."""
    looks = (
        Check("peer.reach", "Reached", partial(reach, peer=peer)),
        Check("peer.versions", "Versions and settings", partial(versions, peer=peer)),
        Check("peer.ports", "Ports", partial(ports, peer=peer)),
        Check("peer.clock", "Clocks", partial(clock, peer=peer)),
        Check("peer.latency", "Latency", partial(latency, peer=peer)),
        Check("peer.mtu", "Packet size", partial(mtu, peer=peer)),
    )
    rates = tuple(Check(f"peer.{n}", n, partial(backend, peer=peer, name=n)) for n in BACKENDS)
    return (*looks, *rates, Check("peer.auto", "--transfer auto", partial(auto, peer=peer)))


def _visit(machine: Machine, peer: str) -> Visit | Result:
    """The visit's answer (asked once); or, where there was none, the reason to skip."""
    answer = machine.ask(Visit, peer)
    if isinstance(answer, Silence):
        return Result(Status.SKIP, f"{answer.why.value}: {answer.reason}")
    return skip(answer.error) if answer.error else answer
