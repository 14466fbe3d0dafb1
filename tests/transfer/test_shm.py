"""What only shared memory has: whose region may be mapped, and how `auto` decides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest

from pd.transfer import native
from pd.transfer.auto import AutoTransport
from pd.transfer.choose import make_transport
from pd.transfer.host import is_dead, this_life, watch, why_elsewhere
from pd.transfer.shm import ShmEndpoint, ShmTransport
from pd.transfer.transport import CannotMeet, PeerLost, Span, TransferError
from tests.transfer.kit import Child, Net, done_jobs, lost_after_write, open_fds, wait_jobs, wait_lost


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net("shm")
    yield made
    made.close()


def shm_part(endpoint: bytes) -> ShmEndpoint:
    return msgspec.msgpack.decode(endpoint, type=ShmEndpoint)


def with_life(endpoint: ShmEndpoint, **change: object) -> ShmEndpoint:
    return msgspec.structs.replace(endpoint, life=msgspec.structs.replace(endpoint.life, **change))


# ---- who is who -------------------------------------------------------------------------------------------------


def test_a_peer_on_another_host_or_in_another_container_is_refused_saying_so(net: Net) -> None:
    a, _ = net.make("a", 64)
    b, _ = net.make("b", 64)
    there = shm_part(b.endpoint())
    other_host = with_life(there, boot_id="0000-1111")
    with pytest.raises(CannotMeet, match=r"shm cannot reach b: it runs on another host \(boot 0000-1111, ours "):
        a.connect("b", msgspec.msgpack.encode(other_host))
    other_container = with_life(there, pid_namespace="pid:[1]")
    with pytest.raises(CannotMeet, match=r"in another container \(pid:\[1\], ours pid:\["):
        a.connect("b", msgspec.msgpack.encode(other_container))


def test_who_copies_without_cpp_says_so(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = net.make("a", 64)
    monkeypatch.setattr(native, "load", lambda: object())
    assert a.describe("b") == "shm (one host)"
    monkeypatch.setattr(native, "load", lambda: None)
    assert a.describe("b") == "shm (one host; its copies in C++ are not built, so it is slower)"


def test_a_reused_process_id_is_not_taken_for_the_peer(net: Net) -> None:
    a, _ = net.make("a", 64)
    b, view_b = net.make("b", 64)
    there = shm_part(b.endpoint())
    a.connect("b", msgspec.msgpack.encode(with_life(there, started=there.life.started - 1)))
    ended = lost_after_write(a, "b", Span(0, 0, 64))
    assert f"process {os.getpid()} of b ended" in ended[-1].reason  # type: ignore[union-attr]
    assert view_b == bytes(64)


def test_a_reused_descriptor_is_not_taken_for_the_region(net: Net) -> None:
    a, _ = net.make("a", 64)
    b, _ = net.make("b", 64)
    there = shm_part(b.endpoint())
    source = msgspec.structs.replace(there.source, inode=there.source.inode + 1)
    a.connect("b", msgspec.msgpack.encode(msgspec.structs.replace(there, source=source)))
    ended = lost_after_write(a, "b", Span(0, 0, 64))
    assert "cannot map the region of b" in ended[-1].reason  # type: ignore[union-attr]
    assert f"not inode {source.inode}" in ended[-1].reason  # type: ignore[union-attr]


def test_memory_that_could_shrink_under_us_is_not_mapped(net: Net) -> None:
    a, _ = net.make("a", 64)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 8192)
    b, _ = net.make("b", 64)
    there = shm_part(b.endpoint())
    source = msgspec.structs.replace(there.source, fd=unsealed, inode=os.fstat(unsealed).st_ino)
    a.connect("b", msgspec.msgpack.encode(msgspec.structs.replace(there, source=source)))
    ended = wait_lost(a)
    assert "may shrink while we write to it" in ended[-1].reason  # type: ignore[union-attr]
    os.close(unsealed)


def test_lost_peers_leave_no_descriptor(net: Net) -> None:
    a, _ = net.make("a", 64)
    b, _ = net.make("b", 64)
    a.connect("b", b.endpoint())
    a.write("b", [Span(0, 0, 1)], job=0)
    wait_jobs(a, 1)
    before = len(open_fds())
    for i in range(20):
        child = Child("shm", f"c{i}", 64) if i < 2 else None
        endpoint = child.endpoint if child else msgspec.msgpack.encode(with_life(shm_part(b.endpoint()), started=1))
        a.connect(f"c{i}", endpoint)
        if child:
            child.close()
        wait_lost(a)
    assert len(open_fds()) == before


def test_our_own_life_is_seen_alive_and_a_childs_end_is_seen() -> None:
    ours = this_life()
    assert not is_dead(ours, ours)
    assert is_dead(msgspec.structs.replace(ours, started=ours.started - 1), ours)
    assert not is_dead(msgspec.structs.replace(ours, boot_id="x", pid=1 << 22), ours), "out of sight is not dead"
    assert why_elsewhere(ours, ours) is None
    child = Child("shm", "c", 64)
    life = shm_part(child.endpoint).life
    assert not is_dead(life, ours)
    child.process.kill()
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(life, ours), "a zombie writes nothing"
    child.close()
    assert is_dead(life, ours) and watch(life) is None


def test_shm_says_what_it_cannot_register() -> None:
    transport = ShmTransport(me="a")
    with pytest.raises(TransferError, match="not the 4096 bytes at 0x10000 made elsewhere"):
        transport.register(0x10000, 4096)
    transport.close()


# ---- auto -------------------------------------------------------------------------------------------------------


def foreign(endpoint: bytes, **change: object) -> bytes:
    """An auto endpoint as another host would send it."""
    tag, shm, *rest = msgspec.msgpack.decode(endpoint)
    return msgspec.msgpack.encode([tag, msgspec.msgpack.encode(with_life(shm_part(shm), **change)), *rest])


def test_auto_takes_shm_on_one_host_and_tcp_beyond_and_says_why() -> None:
    net = Net("auto")
    a, view_a = net.make("a", 4096)
    near, view_near = net.make("near", 4096)
    far, view_far = net.make("far", 4096)
    view_a[:] = os.urandom(4096)
    a.connect("near", near.endpoint())
    a.connect("far", foreign(far.endpoint(), boot_id="elsewhere"))
    auto = cast(AutoTransport, a)
    assert (auto.describe("near") or "").startswith("shm (one host")
    assert auto.describe("far") == f"tcp (on another host (boot elsewhere, ours {this_life().boot_id}))"
    a.write("near", [Span(0, 0, 4096)], job=1)
    a.write("far", [Span(0, 0, 4096)], job=2)
    assert sorted(done_jobs(wait_jobs(a, 2))) == [1, 2]
    assert view_near == view_a and view_far == view_a
    net.close()


def test_auto_says_where_a_device_that_it_was_given_is_not_used() -> None:
    a, b = (AutoTransport(me=me, devices=("lo",)) for me in "ab")
    for transport in (a, b):
        transport.allocate(64)
    a.connect("b", b.endpoint())
    assert a.describe("b") == "shm (one host, so not over lo)"
    a.connect("far", foreign(b.endpoint(), boot_id="elsewhere"))
    assert (a.describe("far") or "").startswith("tcp (on another host")
    for transport in (a, b):
        transport.close()


def test_auto_takes_tcp_where_the_memory_cannot_be_opened() -> None:
    net = Net("auto")
    a, view_a = net.make("a", 64)
    b, view_b = net.make("b", 64)
    view_a[:] = b"\x01" * 64
    tag, shm, *rest = msgspec.msgpack.decode(b.endpoint())
    there = shm_part(shm)
    source = msgspec.structs.replace(there.source, fd=99_999)
    shm = msgspec.msgpack.encode(msgspec.structs.replace(there, source=source))
    a.connect("b", msgspec.msgpack.encode([tag, shm, *rest]))
    assert cast(AutoTransport, a).describe("b").startswith("tcp (its memory cannot be opened: ")
    a.write("b", [Span(0, 0, 64)], job=1)
    assert done_jobs(wait_jobs(a, 1)) == [1]
    assert view_b == b"\x01" * 64
    net.close()


def test_auto_severs_a_peer_of_another_host_and_not_a_living_one_of_this() -> None:
    net = Net("auto")
    a, _ = net.make("a", 64)
    far, _ = net.make("far", 64)
    near, _ = net.make("near", 64)
    a.connect("far", foreign(far.endpoint(), boot_id="elsewhere"))
    a.connect("near", near.endpoint())
    assert a.sever("far")
    assert not a.sever("near")
    assert not a.sever("a stranger")
    far.connect("a", foreign(a.endpoint(), boot_id="elsewhere"))
    lost_after_write(far, "a", Span(0, 0, 64))
    net.close()


# ---- choosing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "shm", "tcp"])
def test_each_name_makes_its_backend(name: str) -> None:
    transport = make_transport(name, me="a", host="127.0.0.1", devices=())
    assert transport.name == name
    transport.allocate(64)
    assert 0 < len(transport.endpoint()) <= 4096
    transport.close()


def test_an_unknown_backend_and_devices_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(
        TransferError, match="no transfer backend is called 'ucx'; there are auto, shm, tcp, nixl, mooncake"
    ):
        make_transport("ucx", me="a", host="127.0.0.1")
    with pytest.raises(TransferError, match="cannot honour mlx5_0, mlx5_1"):
        make_transport("shm", me="a", host="127.0.0.1", devices=("mlx5_0", "mlx5_1"))
    with pytest.raises(TransferError, match="network interface mlx5_0 has no IPv4 address") as caught:
        make_transport("auto", me="a", host="127.0.0.1", devices=("mlx5_0",))
    assert caught.value.hint.startswith("interfaces here: ") and "lo" in caught.value.hint
    assert "; RDMA devices, which nixl and mooncake take: " in caught.value.hint


@pytest.mark.parametrize("name", ["auto", "tcp", "mooncake"])
@pytest.mark.parametrize("devices", [("mlx5_0",), ("mlx5_0", "mlx5_1:2"), ("lo", "mlx5_1:2")])
def test_devices_of_rdma_are_refused_saying_which_options_take_them(
    name: str, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.transfer.address.rdma_devices", lambda: ["mlx5_0", "mlx5_1"])
    with pytest.raises(TransferError) as caught:
        make_transport(name, me="a", host="127.0.0.1", devices=devices)
    told = f"{name} moves KV over a network interface, and RDMA devices are not: "
    given = [device for device in devices if device != "lo"]
    assert str(caught.value) == told + ", ".join(given)
    as_nixl = ",".join({"mlx5_0": "mlx5_0:1"}.get(each, each) for each in given)
    as_mooncake = ",".join({"mlx5_1:2": "mlx5_1"}.get(each, each) for each in given)
    assert caught.value.hint == (
        f"what takes them: --transfer nixl --transfer-devices {as_nixl}, or --transfer mooncake "
        f"--transfer-param protocol=rdma --transfer-devices {as_mooncake}"
    )


def test_an_interface_that_is_named_like_an_rdma_device_is_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd.transfer.address.rdma_devices", lambda: ["lo"])
    transport = make_transport("auto", me="a", host="127.0.0.1", devices=("lo",))
    transport.close()


def test_nixl_is_given_no_devices_that_are_not_here_as_ucx_would_take_the_others_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pd.transfer.address.rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr("pd.transfer.address.socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0.7")])
    devices = ("lo", "mlx5_1:1", "mlx5_0", "mlx5_0:1", "eth0", "eth0.7", "lo:1")
    told = "^nixl: this host has no network device mlx5_1:1, mlx5_0, eth0, lo:1$"
    with pytest.raises(TransferError, match=told) as got:
        make_transport("nixl", me="a", host="127.0.0.1", devices=devices)
    assert got.value.hint == "it has eth0.7, lo, mlx5_0:1"


@pytest.mark.parametrize(
    ("here", "asked", "told"),
    [
        ([], (), "this host has no RDMA device"),
        ([], ("mlx5_0",), "this host has no RDMA device"),
        (["mlx5_0", "mlx5_1"], ("mlx5_1", "mlx5_7"), "no device mlx5_7 here, only mlx5_0, mlx5_1"),
    ],
)
def test_mooncake_over_rdma_that_is_not_here_is_refused_since_it_would_take_tcp_unsaid(
    monkeypatch: pytest.MonkeyPatch, here: list[str], asked: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr("pd.transfer.mooncake.rdma_devices", lambda: here)
    with pytest.raises(TransferError, match=f"mooncake over rdma: {told}"):
        make_transport("mooncake", me="a", host="127.0.0.1", devices=asked, params={"protocol": "rdma"})


@pytest.mark.parametrize("pid", [1 << 31, 1 << 40])
def test_a_process_id_that_no_process_can_have_is_one_that_ended_and_harms_nobody(net: Net, pid: int) -> None:
    a, view_a, _, view_b = net.pair(64)
    view_a[:] = b"\x01" * 64
    there = with_life(shm_part(net.make("c", 64)[0].endpoint()), pid=pid)
    a.connect("c", msgspec.msgpack.encode(there))
    assert wait_lost(a)[-1] == PeerLost("c", f"process {pid} of c ended")
    assert a.sever("c")
    a.write("b", [Span(0, 0, 64)], job=1)
    assert done_jobs(wait_jobs(a, 1)) == [1] and view_b == view_a


def test_a_life_of_no_process_is_a_broken_endpoint(net: Net) -> None:
    a, _ = net.make("a", 64)
    there = shm_part(a.endpoint())
    for pid in (0, -1):
        with pytest.raises(TransferError, match="b sent a broken shm endpoint"):
            a.connect("b", msgspec.msgpack.encode(with_life(there, pid=pid)))
