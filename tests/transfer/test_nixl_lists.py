"""Batches told to NIXL by the numbers of their pieces: the very bytes that they name, and no list left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pd.transfer.library import Copies, LibraryLimits, Memory, Spans
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.nixl import nixl_transport
from pd.transfer.nixl_lists import (
    ENOUGH,
    MAX_GRIDS,
    MAX_PIECES,
    Grid,
    Lists,
    Numbering,
    Side,
    find_grid,
    table_of,
)
from pd.transfer.transport import JobFailed, PeerLost, Span
from tests.transfer import fake_nixl
from tests.transfer.kit import cpp, done_jobs, wait_jobs, wait_lost, why_absent

NBYTES = 1 << 18
LIMITS = LibraryLimits(connect_s=5, stall_s=5, look_s=0.02)


def rows(*spans: tuple[int, int, int]) -> Spans:
    return np.array(spans, np.int64).reshape(-1, 3)


def on_grid(rng: random.Random, grid: Grid, num_pieces: int, *, joined: int = 1) -> list[Span]:
    """Pieces that lie on it in any order, none twice on either side; of up to `joined` each."""
    (src_first, src_step), (dst_first, dst_step), nbytes = grid
    src, dst = list(range(0, num_pieces * joined, joined)), list(range(0, num_pieces * joined, joined))
    rng.shuffle(src)
    rng.shuffle(dst)
    return [
        Span(src_first + s * src_step, dst_first + d * dst_step, nbytes * rng.randint(1, joined))
        for s, d in zip(src, dst, strict=True)
    ]


# ---- numbers --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["native", "numpy"])
def numbering(request: pytest.FixtureRequest) -> Numbering:
    return Numbering(cpp() if request.param == "native" else None)


def pieces_of(grid: Grid, numbering: Numbering, spans: Spans) -> list[tuple[int, int]] | None:
    """The numbers, in pairs."""
    found = numbering.of(grid, table_of(grid), spans)
    return None if found is None else list(zip(*(side.tolist() for side in found), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_have_the_numbers_that_their_offsets_say(numbering: Numbering, seed: int) -> None:
    rng = random.Random(seed)
    nbytes = rng.randint(1, 5000)
    is_dense = rng.random() < 0.5
    steps = [nbytes if is_dense else nbytes + rng.randint(0, 3) * 64 for _ in range(2)]
    src, dst = (Side(rng.randrange(step), step) for step in steps)
    grid, joined = Grid(src, dst, nbytes), rng.randint(1, 4) if is_dense else 1
    spans = on_grid(rng, grid, rng.randint(1, 300), joined=joined)
    expected = [
        ((span.src - src.first) // src.step + k, (span.dst - dst.first) // dst.step + k)
        for span in spans
        for k in range(span.nbytes // nbytes)
    ]
    assert pieces_of(grid, numbering, rows(*spans)) == expected, f"seed {seed}"
    found = find_grid(rows(*spans))
    assert found is not None and pieces_of(found, numbering, rows(*spans)) is not None, f"seed {seed}"


@pytest.mark.parametrize(
    "wrong",
    [(11, 0, 10), (10, 1, 10), (10, 0, 9), (10, 0, 20)],
    ids=["source", "destination", "length", "joined, though the source is not dense"],
)
def test_what_does_not_lie_on_a_grid_has_no_numbers_there(numbering: Numbering, wrong: tuple[int, int, int]) -> None:
    grid = Grid(Side(10, 30), Side(0, 10), 10)
    assert pieces_of(grid, numbering, rows((40, 10, 10), (10, 0, 10))) == [(1, 1), (0, 0)]
    assert pieces_of(grid, numbering, rows((40, 10, 10), wrong)) is None


@pytest.mark.parametrize("step", [64, 192, 320, 448])
def test_what_lies_before_the_first_piece_has_no_number(numbering: Numbering, step: int) -> None:
    """Counted without a sign it lies 2^64 further on, which for some of these steps is on the grid."""
    for first in range(0, step, 64):
        grid = Grid(Side(first, step), Side(first, step), 64)
        for offset in range(0, first, 64):
            assert pieces_of(grid, numbering, rows((offset, offset, 64))) is None, f"{offset} on {grid}"


def test_more_pieces_than_are_kept_room_for_have_no_numbers(numbering: Numbering) -> None:
    grid = Grid(Side(0, 8), Side(0, 8), 8)
    half = MAX_PIECES // 2 * 8
    assert pieces_of(grid, numbering, rows((0, 0, half), (half, half, half))) == [(k, k) for k in range(MAX_PIECES)]
    assert pieces_of(grid, numbering, rows((0, 0, half), (half, half, half + 8))) is None


def test_rows_that_do_not_lie_one_behind_the_other_are_numbered_all_the_same(numbering: Numbering) -> None:
    grid = Grid(Side(0, 8), Side(0, 8), 8)
    spread = np.repeat(rows((8, 0, 8), (0, 8, 8)), 2, axis=0)[::2]
    assert pieces_of(grid, numbering, spread) == [(1, 0), (0, 1)]


def test_the_coarsest_grid_is_found_and_none_where_there_is_none() -> None:
    def found(*spans: tuple[int, int, int]) -> Grid | None:
        return find_grid(rows(*spans))

    assert found((5, 40, 10), (25, 0, 10)) == Grid(Side(5, 10), Side(0, 10), 10)
    assert found((0, 40, 10), (35, 0, 10)) == Grid(Side(0, 35), Side(0, 10), 10)
    assert found((0, 40, 20), (50, 0, 30)) == Grid(Side(0, 10), Side(0, 10), 10)
    assert found((0, 40, 20), (55, 0, 30)) is None, "joined pieces on a side that is not dense"
    assert found((0, 40, 10), (5, 0, 10)) is None, "they overlap"
    assert found((0, 40, 30), (50, 0, 31)) is None, "of single bytes"


# ---- transfers, over a fake agent -----------------------------------------------------------------------------


class Two:
    def __init__(self, agents: list[fake_nixl.Agent]) -> None:
        self.a, self.b = (nixl_transport(me=me, limits=LIMITS) for me in "ab")
        self.views = [end.allocate(NBYTES) for end in (self.a, self.b)]
        self.agent, _ = agents
        self.a.connect("b", self.b.endpoint())
        self.job = 0

    def move(self, spans: Sequence[Span], *, is_read: bool = False) -> bool:
        """Whether it was told by numbers. The bytes are what they must be."""
        before = len(self.agent.transfers)
        move_exactly(self.a, self.views, spans, self.job, is_read=is_read)
        self.job += 1
        told = {each.is_numbered for each in self.agent.transfers[before:] if each.ours[0][1] != 32}  # no door
        assert len(told) == 1
        return told.pop()

    def close(self) -> None:
        self.a.close()
        self.b.close()
        assert self.agent.faults == [] and self.agent.live_lists() == []


def move_exactly(
    end: LibraryTransport, views: list[memoryview], spans: Sequence[Span], job: int, *, is_read: bool
) -> None:
    rng = random.Random(job)
    for view in views:
        view[:] = rng.randbytes(len(view))
    here, there = (bytes(view) for view in views)
    source, sink = (there, bytearray(here)) if is_read else (here, bytearray(there))
    for src, dst, nbytes in spans:
        sink[dst : dst + nbytes] = source[src : src + nbytes]
    (end.read if is_read else end.write)("b", spans, job=job)
    assert done_jobs(wait_jobs(end, 1)) == [job]
    assert [bytes(view) for view in views] == ([sink, there] if is_read else [here, sink])


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    made = Two(fake_nixl.install(monkeypatch))
    yield made
    made.close()


DENSE = Grid(Side(0, 64), Side(64 * 3, 64), 64)


@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
def test_batches_on_a_grid_are_told_by_numbers_and_others_row_by_row(two: Two, is_read: bool) -> None:
    rng = random.Random(1)
    odd = [Span(i * 100, i * 131 + i % 2, 50 + i) for i in range(2 * ENOUGH)]
    assert two.move(on_grid(rng, DENSE, 100), is_read=is_read)
    assert not two.move(odd, is_read=is_read)
    assert two.move(on_grid(rng, DENSE, 100, joined=5), is_read=is_read)
    assert two.move(on_grid(rng, DENSE, ENOUGH - 1), is_read=is_read), "few rows on a grid that is known"
    assert two.move(on_grid(rng, Grid(Side(7, 90), Side(3, 77), 70), 100), is_read=is_read)
    assert len(two.agent.live_lists()) == 4


def test_few_rows_make_no_list(two: Two) -> None:
    assert not two.move(on_grid(random.Random(1), DENSE, ENOUGH - 1))
    assert two.agent.lists == []


def test_reads_and_writes_of_one_peer_have_lists_of_their_own(two: Two) -> None:
    for _ in range(3):
        assert two.move(on_grid(random.Random(2), DENSE, 20)) and two.move(
            on_grid(random.Random(3), DENSE, 20), is_read=True
        )
    assert len(two.agent.lists) == 4


def test_each_region_of_ours_has_lists_of_its_own() -> None:
    agent = fake_nixl.Agent("a")
    agent.add_remote_agent(b"b")
    lists = Lists(agent, "UCX", Numbering(None), "b", Memory(1 << 20), NBYTES)
    spans = rows(*on_grid(random.Random(9), DENSE, 20))
    for ours in (Memory(2 << 20), Memory(3 << 20), Memory(2 << 20)):
        made = lists.make(Copies(ours, Memory(1 << 20), spans, is_read=False), NBYTES)
        assert [row[0] for row in made.ours] == (spans[:, 0] + ours.address).tolist()
    assert len(agent.lists) == 4
    assert lists.make(Copies(Memory(2 << 20), Memory(4 << 20), spans, is_read=False), NBYTES) is None, "not its region"
    lists.release()
    assert agent.live_lists() == []


def test_a_peer_has_so_many_lists_and_the_one_not_used_for_longest_goes(two: Two) -> None:
    rng = random.Random(4)
    grids = [Grid(Side(first, 512), Side(0, 512), 512) for first in range(3 * MAX_GRIDS)]
    for grid in grids:
        assert two.move(on_grid(rng, grid, ENOUGH)) and two.move(on_grid(rng, grids[0], ENOUGH))
        assert len(two.agent.live_lists()) <= 2 * MAX_GRIDS
    assert len(two.agent.lists) == 2 * len(grids), "the one used all the time was made once"


def test_a_peer_that_is_let_go_keeps_its_lists_until_its_transfers_have_ended(two: Two) -> None:
    assert two.move(on_grid(random.Random(5), DENSE, 20))
    two.agent.is_held = True
    two.a.write("b", on_grid(random.Random(6), DENSE, 20), job=99)
    deadline = time.monotonic() + 5
    while two.agent.transfers[-1].state == "DONE":
        assert time.monotonic() < deadline, "nothing was posted"
        time.sleep(1e-3)
    two.a.sever("b")
    (end,) = wait_jobs(two.a, 1)
    assert isinstance(end, JobFailed) and end.may_land
    assert two.agent.peers and len(two.agent.live_lists()) == 2
    two.agent.carry_out(two.agent.transfers[-1])
    two.close()
    assert two.agent.peers == set()


def test_a_list_that_cannot_be_prepared_loses_the_peer_by_name_and_leaves_none_behind(two: Two) -> None:
    assert not two.move([Span(0, 0, 1)])
    (two.agent.refuses,) = two.agent.peers
    two.a.write("b", on_grid(random.Random(7), DENSE, 20), job=0)
    failed, lost = wait_lost(two.a)
    assert isinstance(failed, JobFailed) and failed.job == 0 and isinstance(lost, PeerLost) and lost.peer == "b"
    assert failed.reason == lost.reason == "posting: nixl raised NixlError: NIXL_ERR_NOT_FOUND"
    assert [each.is_released for each in two.agent.lists] == [True]


# ---- and over NIXL itself -------------------------------------------------------------------------------------


@pytest.mark.skipif(why_absent("nixl") is not None, reason=str(why_absent("nixl")))
@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
def test_nixl_moves_exactly_what_numbers_name(monkeypatch: pytest.MonkeyPatch, is_read: bool) -> None:
    made = []
    make = Lists.make

    def listening(self: Lists, copies: object, nbytes: int) -> object:
        made.append(make(self, copies, nbytes))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(Lists, "make", listening)
    ends = [nixl_transport(me=me, limits=LIMITS) for me in "ab"]
    views = [end.allocate(NBYTES) for end in ends]
    ends[0].connect("b", ends[1].endpoint())
    rng = random.Random(8)
    for job in range(2 * MAX_GRIDS):
        nbytes = rng.choice([64, 128, 200])
        steps = (nbytes, nbytes) if job % 2 else (nbytes + 8, nbytes + 24)
        grid = Grid(Side(rng.randrange(steps[0]), steps[0]), Side(rng.randrange(steps[1]), steps[1]), nbytes)
        move_exactly(ends[0], views, on_grid(rng, grid, 200, joined=1 + 3 * (job % 2)), job, is_read=is_read)
    for end in ends:
        end.close()
    assert len(made) == 2 * MAX_GRIDS and all(made)
