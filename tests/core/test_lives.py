"""The ways to peers: what is said of one that breaks again and again."""

from __future__ import annotations

from pd.runtime.core.events import Effect, Peer, Stamp
from pd.runtime.core.lives import SETTLED_S, Links
from pd.runtime.wire.values import Role
from tests.core.routing import hello

LIFE = Peer("d0", "1")


def said(effects: list[Effect]) -> list[str]:
    return [effect.what for effect in effects if isinstance(effect, Stamp)]


def test_a_way_that_breaks_each_time_it_is_tried_is_told_once_and_again_when_it_holds() -> None:
    links = Links(attach_s=1.0)
    links.meet(hello("d0", Role.DECODE), 0.0)
    assert said(links.attach(lambda name: False, 0.0)) == ["attached"]
    assert said(links.break_off(LIFE, "refused", now=0.1)) == ["unreachable"]
    for second in range(1, 40, 2):
        assert links.attach(lambda name: False, second + 0.5) != []
        assert said(links.break_off(LIFE, "refused", now=second + 0.6)) == []
    assert said(links.attach(lambda name: False, 60.0)) == []
    assert said(links.attach(lambda name: False, 60.0 + SETTLED_S)) == ["attached"]
    assert said(links.attach(lambda name: False, 80.0)) == []
    assert said(links.break_off(LIFE, "refused", now=81.0)) == ["unreachable"]
