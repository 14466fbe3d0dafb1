"""What libraries are given: batches that lose no byte; and Mooncake's pieces over tcp, with an engine that is none."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from pd.transfer import library, mooncake
from pd.transfer.library import Copies, Memory, batches
from pd.transfer.mooncake import move_by_pieces


@pytest.mark.parametrize("seed", range(60))
def test_batches_hold_every_byte_once_in_order_and_keep_both_bounds(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    dice = random.Random(seed)
    nbytes, num_pieces = dice.choice((7, 64, 1000, 99_999)), dice.choice((1, 3, 1024))
    monkeypatch.setattr(library, "BATCH_NBYTES", nbytes)
    rows = [(dice.randrange(9999), dice.randrange(9999), dice.randrange(1, 400)) for _ in range(dice.randrange(40))]
    spans = np.array(rows, np.int64).reshape(-1, 3)
    cut = list(batches(spans, int(spans[:, 2].sum()), max_pieces=num_pieces))
    assert copied(row for batch in cut for row in batch.tolist()) == copied(rows)
    assert all(1 <= len(batch) <= num_pieces and batch[:, 2].sum() <= nbytes for batch in cut)


def copied(rows: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for src, dst, nbytes in rows for i in range(nbytes)]


class Engine:
    """Takes pieces, and ends each after it was asked some times; one by failing, if told to."""

    def __init__(self, *, fails: int | None = None, refuses: int | None = None) -> None:
        self.fails, self.refuses = fails, refuses
        self.begun: list[tuple[str, int, int, int]] = []
        self.open: dict[int, int] = {}
        self.most_open = 0

    def batch_transfer_async_write(self, session: str, here: list[int], yonder: list[int], sizes: list[int]) -> int:
        assert session == "host:1" and len(here) == len(yonder) == len(sizes) == 1
        ticket = len(self.begun) + 1
        if ticket == self.refuses:
            return 0
        self.begun.append(("write", here[0], yonder[0], sizes[0]))
        self.open[ticket] = ticket % 3
        self.most_open = max(self.most_open, len(self.open))
        return ticket

    def transfer_check_status(self, ticket: int) -> int:
        if self.open[ticket]:
            self.open[ticket] -= 1
            return 0
        del self.open[ticket]
        return -1 if ticket == self.fails else 1


@pytest.mark.parametrize(("ends", "code"), [({}, 0), ({"fails": 3}, -1), ({"fails": 20}, -1), ({"refuses": 9}, -1)])
def test_pieces_are_begun_in_a_window_and_none_is_left_when_it_returns(
    monkeypatch: pytest.MonkeyPatch, ends: dict[str, int], code: int
) -> None:
    monkeypatch.setattr(mooncake, "_WINDOW", 4)
    engine = Engine(**ends)
    spans = np.array([[10 * i, 20 * i, 5] for i in range(20)])
    assert move_by_pieces(engine, "host:1", Copies(Memory(1000), Memory(5000), spans, is_read=False)) == code
    due = [("write", 1000 + 10 * i, 5000 + 20 * i, 5) for i in range(20)]
    assert engine.begun == due[: len(engine.begun)] and (code or len(engine.begun) == 20)
    assert engine.open == {}, "a piece that is not ended may still move"
    assert engine.most_open <= 4
