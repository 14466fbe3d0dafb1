"""A leader that waits for its ranks to start: whoever cannot is heard out before its end is told."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pd.runtime.config import ConfigError, InstanceConfig
from pd.runtime.core.events import Peer, Received
from pd.runtime.roles.brood import Ended
from pd.runtime.roles.ranks import Ranks, RanksLost
from pd.runtime.wire.plans import RankFailed, RankLoading
from pd.runtime.wire.values import Role

STAYS: Any = SimpleNamespace(num_seen=0)  # nobody tells it to stop


class Link:
    """Brings a message at each look, and none in between."""

    def __init__(self) -> None:
        self.on_its_way: deque[Any] = deque()
        self.socket = SimpleNamespace(poll=self._poll)  # no time passes
        self._there: deque[Any] = deque()

    def receive(self) -> Received | None:
        return Received(Peer("0", ""), self._there.popleft()) if self._there else None

    def _poll(self, timeout_ms: int) -> None:
        if self.on_its_way:
            self._there.append(self.on_its_way.popleft())


@dataclass
class Rank:
    """Says its last words when the leader has just looked for some, and ends by the time it looks who lives."""

    link: Link
    words: list[object]
    status: int

    def check(self) -> None:
        self.link.on_its_way.extend(self.words)
        raise Ended(0, self.status)

    def end(self, deadline: float) -> None:
        """It has."""


def start(words: list[object], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for such a rank to be ready, which raises what comes of it."""
    link = Link()
    monkeypatch.setattr(Ranks, "_start", lambda self, config, epoch, checkpoint: Rank(link, words, status))
    with zmq.Context[zmq.Socket[bytes]]() as context:
        config = InstanceConfig(role=Role.PREFILL, name="p")
        with Ranks(context, config, epoch="e", checkpoint=Path("none")) as ranks:
            hub, ranks.hub = ranks.hub, link  # type: ignore[assignment]
            try:
                ranks.wait_ready(STAYS)
            finally:
                ranks.hub = hub


def test_what_a_rank_said_before_it_ended_is_told_and_not_that_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[object] = [RankLoading(0, 1, 2), RankFailed(0, "shm uses no network devices", "--transfer tcp", True)]
    with pytest.raises(ConfigError, match="shm uses no network devices") as told:
        start(words, 2, monkeypatch)
    assert told.value.hint == "--transfer tcp"


def test_a_crash_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RanksLost, match="rank 0: ValueError: no such tensor"):
        start([RankFailed(0, "ValueError: no such tensor", "", False)], 1, monkeypatch)


@pytest.mark.parametrize(
    ("status", "told"),
    [(1, "rank 0 ended with status 1"), (-signal.SIGKILL, "rank 0 was ended by SIGKILL, perhaps for want of memory")],
)
def test_one_that_ends_without_a_word_is_told_by_how_it_ended(
    status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RanksLost, match=told):
        start([RankLoading(0, 1, 2)], status, monkeypatch)
