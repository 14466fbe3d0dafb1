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


def test_a_life_that_can_never_be_reached_is_told_of_once_and_tried_no_more_but_its_next_is() -> None:
    links = Links(attach_s=1.0)
    links.meet(hello("d0", Role.DECODE), 0.0)
    links.attach(lambda name: False, 0.0)
    assert said(links.break_off(LIFE, "reset", now=0.1)) == ["unreachable"]  # as one of its ranks says
    assert said(links.bar(LIFE, "8 heads there, 4 here")) == ["barred"]
    assert links.bar(LIFE, "8 heads there, 4 here") == links.break_off(LIFE, "reset", now=0.2) == []
    assert links.find(LIFE) is None and links.why_barred(LIFE) == "8 heads there, 4 here"
    assert links.attach(lambda name: False, 1000.0) == []
    links.cut(LIFE)
    assert links.why_barred(LIFE) == "8 heads there, 4 here"
    links.meet(hello("d0", Role.DECODE, epoch="2"), 1001.0)
    assert said(links.attach(lambda name: False, 1001.0)) == ["attached"]
    assert links.bar(LIFE, "late word of the old one") == [] and links.find(Peer("d0", "2")) is not None


def test_who_was_cut_off_from_all_that_it_can_reach_is_isolated_and_who_can_reach_nobody_is_not() -> None:
    """A new life of ours reaches whom we cut off; who is barred it does not reach either."""
    links = Links(attach_s=1.0)
    for name in ("d0", "d1"):
        links.meet(hello(name, Role.DECODE), 0.0)
    links.bar(LIFE, "another layout")
    assert not links.is_isolated
    links.bar(Peer("d1", "1"), "another layout")
    assert not links.is_isolated
    links.meet(hello("d1", Role.DECODE, epoch="2"), 0.0)
    links.cut(Peer("d1", "2"))
    assert links.is_isolated
