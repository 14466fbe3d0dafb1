"""KV in a GPU's memory, over a card that is none (card.py); on a real one: `pytest -m gpu`."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable
from typing import cast

import msgspec
import pytest

from pd.transfer.auto import AutoTransport
from pd.transfer.device import Gpu, Move, wait
from pd.transfer.region import Region
from pd.transfer.shm import ShmTransport
from pd.transfer.tcp_ends import PORTION_NBYTES, StagedEnds, portioned
from pd.transfer.transport import CannotMeet, PeerLost, RegistrationFailed, Span, TransferError
from tests.transfer.card import Card
from tests.transfer.kit import Net, done_jobs, wait_jobs, wait_lost

MIB = 1 << 20


# ---- through pinned host memory ---------------------------------------------------------------------------------


def test_pieces_are_cut_where_a_portion_is_full_and_none_is_lost() -> None:
    pieces = [(10, PORTION_NBYTES - 4), (0, 3), (7 * MIB, 2 * PORTION_NBYTES + 5)]
    portions = list(portioned(pieces))
    assert [sum(part.nbytes for part in portion) for portion in portions] == [*[PORTION_NBYTES] * 3, 4]
    assert [tuple(part) for part in portions[0]] == [
        (10, 0, PORTION_NBYTES - 4),
        (0, PORTION_NBYTES - 4, 3),
        (7 * MIB, PORTION_NBYTES - 1, 1),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_what_leaves_in_portions_comes_in_whole_whatever_the_socket_takes(seed: int) -> None:
    """Between two cards, by hand: a piece that was yielded is read as late as a link may read it."""
    rng = random.Random(seed)
    nbytes = 5 * PORTION_NBYTES
    source, sink = bytearray(rng.randbytes(nbytes)), bytearray(nbytes)
    cards = Card(0), Card(1)
    ends = [StagedEnds(region_of(memory), card) for memory, card in zip((source, sink), cards, strict=True)]
    for card in cards:
        card.enter()
    expected = bytearray(nbytes)
    for _ in range(3):  # jobs of one connection: their portions share the rings
        sizes = [rng.randint(1, nbytes // 4) for _ in range(rng.randint(1, 6))]
        leaving = [(rng.randint(0, nbytes - size), size) for size in sizes]
        coming = [(rng.randint(0, nbytes - sum(sizes)), sum(sizes))]
        wire = sent_late(ends[0].out(leaving), ends[0].window or 0)
        is_in = receive(ends[1], coming, wire)
        at = coming[0][0]
        for offset, size in leaving:
            expected[at : at + size] = source[offset : offset + size]
            at += size
        assert is_in() and sink == expected, f"seed {seed}"
    for end, card in zip(ends, cards, strict=True):
        end.close()
        card.close()


def region_of(memory: bytearray) -> Region:
    return Region.on_device(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))


def sent_late(pieces: Iterable[memoryview], window: int) -> bytes:
    """What a socket sends that is always as full as its link's window allows."""
    waiting: list[memoryview] = []
    sent = b""
    for piece in pieces:
        waiting.append(piece)
        if len(waiting) == window:
            sent += bytes(waiting.pop(0))
    return sent + b"".join(bytes(piece) for piece in waiting)


def receive(ends: StagedEnds, pieces: list[tuple[int, int]], wire: bytes) -> Callable[[], bool]:
    wanted: list[tuple[list[memoryview], Callable[[], None]]] = []
    ended: list[bool] = []
    ends.take_in(pieces, lambda views, then: wanted.append((list(views), then)), lambda: ended.append(True))
    at = 0
    while wanted:
        views, then = wanted.pop(0)
        for view in views:
            view[:] = wire[at : at + len(view)]
            at += len(view)
        then()
    assert at == len(wire)
    return lambda: ended == [True]


def test_a_device_that_does_not_copy_is_not_waited_for_for_ever() -> None:
    card = Card(0)
    card.enter()
    stuck = card.copy([])
    card.is_done = lambda mark: False  # type: ignore[method-assign]
    with pytest.raises(TransferError, match=r"the GPU has not copied in 0\.01 s"):
        wait(card, stuck, timeout_s=0.01)


def test_a_card_and_a_host_meet_over_tcp() -> None:
    one, other = Net("tcp-card"), Net("tcp")
    a, view_a = one.make("a", 3 * MIB)
    b, view_b = other.make("b", 3 * MIB)
    view_a[:] = random.Random(1).randbytes(3 * MIB)
    a.connect("b", b.endpoint())
    b.connect("a", a.endpoint())
    a.write("b", [Span(5, 0, 2 * MIB), Span(0, 2 * MIB, 11)], job=1)
    assert done_jobs(wait_jobs(a, 1)) == [1]
    assert view_b[: 2 * MIB + 11] == bytes(view_a[5 : 5 + 2 * MIB]) + bytes(view_a[:11])
    b.read("a", [Span(MIB, 0, 2 * MIB)], job=2)
    assert done_jobs(wait_jobs(b, 1)) == [2]
    assert view_b[: 2 * MIB] == view_a[MIB:]
    assert a.describe("b") == "tcp (through pinned host memory)"
    one.close()
    other.close()


# ---- GPU to GPU -------------------------------------------------------------------------------------------------


def test_shm_refuses_to_mix_a_card_and_a_host_and_says_what_can() -> None:
    one, other = Net("shm-card"), Net("shm")
    a, _ = one.make("a", 64)
    b, _ = other.make("b", 64)
    for end, there, told in ((a, b, "its KV is in host memory, ours on a GPU"), (b, a, "its KV is on a GPU, ours in")):
        with pytest.raises(CannotMeet, match=f"shm cannot reach x: {told}.*; tcp can"):
            end.connect("x", there.endpoint())
    one.close()
    other.close()


class Closed(Card):
    can_share = False


class ClosedAuto(AutoTransport):
    gpu = Closed


def test_memory_that_cannot_be_shared_stops_shm_at_start_and_sends_auto_through_the_host() -> None:
    memory = bytearray(MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    strict = ShmTransport(me="a")
    with pytest.raises(RegistrationFailed, match=f"{MIB} bytes of GPU 0 at .*this card shares nothing"):
        strict.register_on(Closed(0), address, MIB, number=0)
    strict.close()
    net = Net("auto-card")
    a = ClosedAuto(me="a")
    a.register(address, MIB, device=0)
    net.made.append(a)
    b, view_b = net.make("b", MIB)
    a.connect("b", b.endpoint())
    b.connect("a", a.endpoint())
    told = cast(AutoTransport, b).describe("a")
    assert told is not None and told.startswith("tcp (its memory cannot be opened: "), told
    assert told.endswith("through pinned host memory)")
    view_b[:] = b"\x05" * MIB
    b.write("a", [Span(0, 0, MIB)], job=1)
    assert done_jobs(wait_jobs(b, 1)) == [1]
    assert memory == view_b
    net.close()


def test_auto_copies_from_card_to_card_and_refuses_a_broken_handle() -> None:
    net = Net("auto-card")
    a, _ = net.make("a", 64)
    b, _ = net.make("b", 64)
    a.connect("b", b.endpoint())
    assert (a.describe("b") or "").startswith("shm (one host")
    tag, shm, *rest = msgspec.msgpack.decode(b.endpoint())
    end = msgspec.msgpack.decode(shm)
    end[-1][1] += 8  # the offset
    with pytest.raises(TransferError, match="x sent a broken shm endpoint"):
        a.connect("x", msgspec.msgpack.encode([tag, msgspec.msgpack.encode(end), *rest]))
    net.close()


class Failing(Card):
    def is_done(self, mark: object) -> bool:
        raise TransferError("GPU 0: cudaEventQuery: an illegal memory access was encountered (700)")


def test_a_copy_that_the_device_fails_loses_the_peer_with_its_words() -> None:
    net = Net("shm-card")
    memory = bytearray(MIB)
    a = ShmTransport(me="a")
    a.register_on(Failing(0), ctypes.addressof(ctypes.c_char.from_buffer(memory)), MIB, number=0)
    b, _ = net.make("b", MIB)
    a.connect("b", b.endpoint())
    a.write("b", [Span(0, 0, MIB)], job=1)
    ended = wait_lost(a)
    assert isinstance(ended[-1], PeerLost) and "illegal memory access" in ended[-1].reason
    net.close()
    a.device = None  # its copies are never done
    a.close()


def test_without_a_gpu_runtime_it_is_said_that_none_is_loaded() -> None:
    with pytest.raises(TransferError, match="loaded no GPU runtime"):
        Gpu(0)


def test_moves_are_carried_out_in_order_on_a_card() -> None:
    """The fake itself: what the others rest on."""
    card, memory = Card(0), bytearray(b"abc")
    card.enter()
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first, second = card.copy([Move(at, at + 1, 1)]), card.copy([Move(at + 2, at, 1)])
    assert memory == b"abc", "nothing is copied before it is waited for"
    wait(card, second)
    assert memory == b"bbb" and card.is_done(first)
    card.close()
