"""Who lives, who may join, and who is told of whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pd.runtime.core.events import Effect, End, HungUp, Peer, Received, Send, Stamp, Tick
from pd.runtime.wire.messages import (
    Beat,
    Bye,
    Cancel,
    DrainInstance,
    DrainReport,
    Hello,
    Peers,
    Refusal,
    Refused,
    Reserve,
    Wanted,
    Welcome,
    WhoAreYou,
)
from pd.runtime.wire.values import Handle, ModelCard, Role
from tests.core.routing import CARD, LAYOUT, Bench, decoding, hello, load, only_reserve, pair_bench, sent


def told(effects: list[Effect], name: str) -> list[str] | None:
    """Names in the last Peers sent to `name`; None if it was told nothing."""
    lists = [[peer.worker for peer in message.peers] for to, message in sent(effects, Peers) if to == name]
    return lists[-1] if lists else None


def test_a_newcomer_is_welcomed_and_each_role_is_told_of_the_other() -> None:
    bench = Bench()
    effects = bench.join(hello("p0", Role.PREFILL))
    assert sent(effects, Welcome) == [("p0", Welcome())] and told(effects, "p0") == []
    effects = bench.join(hello("d0", Role.DECODE))
    assert told(effects, "d0") == ["p0"] and told(effects, "p0") == ["d0"]
    effects = bench.join(hello("d1", Role.DECODE))
    assert told(effects, "p0") == ["d0", "d1"] and told(effects, "d0") is None
    assert bench.brain.missing() == ()


def test_colocated_instances_have_no_peers_and_serve_alone() -> None:
    bench = Bench()
    assert bench.brain.missing() == (Role.PREFILL, Role.DECODE)
    effects = bench.join(hello("c0", Role.COLOCATED))
    assert not sent(effects, Peers) and bench.brain.missing() == ()


def test_an_instance_with_other_operators_joins_with_a_warning_that_names_both() -> None:
    bench = Bench()
    bench.join(hello("p0", Role.PREFILL, operators="C++ ops (avx2)"))
    alike = bench.join(hello("p1", Role.PREFILL, operators="C++ ops (avx2)"))
    assert not [effect for effect in alike if isinstance(effect, Stamp) and effect.what == "differs"]
    effects = bench.join(hello("d0", Role.DECODE, operators="plain PyTorch"))
    assert sent(effects, Welcome) == [("d0", Welcome())]
    (warning,) = [effect.detail for effect in effects if isinstance(effect, Stamp) and effect.what == "differs"]
    assert "d0 computes with plain PyTorch, p0 with C++ ops (avx2)" in warning


def test_a_repeated_hello_is_welcomed_again_and_changes_nothing() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    effects = bench.join(hello("d0", Role.DECODE))
    assert sent(effects, Welcome) == [("d0", Welcome())]
    assert told(effects, "d0") == ["p0"] and told(effects, "p0") is None
    assert not sent(effects, Cancel) and bench.brain._dispatch.answers["a"].handle == handle


MISFITS: dict[str, tuple[Hello, tuple[str, ...]]] = {
    "wire version": (hello("d1", Role.DECODE, wire_version=99), ("99", "1")),
    "weights": (
        hello("d1", Role.DECODE, model=ModelCard("tiny", "beef", 97, 256)),
        ("'beef'", "'f00d'"),
    ),
    "name": (hello("d1", Role.DECODE, model=ModelCard("big", "f00d", 97, 256)), ("'big'", "'tiny'")),
    "vocabulary": (hello("d1", Role.DECODE, model=ModelCard("tiny", "f00d", 98, 256)), ("98", "97")),
    "layers": (hello("d1", Role.DECODE, layout=replace(LAYOUT, num_layers=3)), ("3", "2")),
    "kv heads": (hello("d1", Role.DECODE, layout=replace(LAYOUT, num_kv_heads=4)), ("4", "2")),
    "head dim": (hello("d1", Role.DECODE, layout=replace(LAYOUT, head_dim=16)), ("16", "8")),
    "dtype": (
        hello("d1", Role.DECODE, layout=replace(LAYOUT, dtype="bfloat16")),
        ("'bfloat16'", "'float32'"),
    ),
    "transfer": (hello("d1", Role.DECODE, transfer="tcp"), ("'tcp'", "'memory'")),
    "role": (hello("d1", Role.ROUTER), ("router",)),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_cannot_meet_is_refused_with_both_values_and_nobody_else_notices(what: str) -> None:
    misfit, values = MISFITS[what]
    bench = pair_bench()
    handle = decoding(bench, "a")
    effects = bench.join(misfit)
    [(to, refusal)] = sent(effects, Refusal)
    assert (to, refusal.epoch) == ("d1", "1")
    assert all(value in refusal.reason for value in values), refusal.reason
    assert not sent(effects, Peers) and not sent(effects, Welcome)
    bench.tokens("d0", handle, 4, 71)
    assert bench.answer_of("a") == [70, 71]


def test_prefill_and_decode_may_keep_kv_of_another_dtype() -> None:
    bench = Bench()
    bench.join(hello("p0", Role.PREFILL))
    other = replace(LAYOUT, dtype="bfloat16")
    assert sent(bench.join(hello("d0", Role.DECODE, layout=other)), Welcome)
    assert sent(bench.join(hello("d1", Role.DECODE, layout=other)), Welcome)


@pytest.mark.parametrize(("prefill", "decode"), [(False, True), (True, False), (False, False)])
def test_kv_of_another_dtype_is_refused_where_either_side_moves_it_only_as_it_lies(prefill: bool, decode: bool) -> None:
    bench = Bench()
    bench.join(hello("p0", Role.PREFILL, converts=prefill))
    assert sent(bench.join(hello("d0", Role.DECODE, converts=decode)), Welcome), "of one dtype they meet"
    bench = Bench()
    bench.join(hello("p0", Role.PREFILL, converts=prefill))
    effects = bench.join(hello("d0", Role.DECODE, converts=decode, layout=replace(LAYOUT, dtype="bfloat16")))
    ((_, refusal),) = sent(effects, Refusal)
    who = " and ".join(name for name, converts in (("d0", decode), ("p0", prefill)) if not converts)
    told = f"KV dtype: 'bfloat16' and 'float32', which {who} with --move direct cannot convert"
    assert refusal.reason == f"d0 and p0 cannot meet: {told}"


def test_page_size_and_axis_order_may_differ() -> None:
    bench = pair_bench()
    other = replace(LAYOUT, page_size=16, order=("page", "layer", "head", "kv", "token", "dim"))
    assert sent(bench.join(hello("d1", Role.DECODE, layout=other)), Welcome)


def test_instances_of_one_role_must_be_able_to_meet_the_same_others() -> None:
    bench = Bench()
    bench.join(hello("p0", Role.PREFILL))
    effects = bench.join(hello("p1", Role.PREFILL, layout=replace(LAYOUT, dtype="float16")))
    assert "dtype: 'float16' and 'float32'" in sent(effects, Refusal)[0][1].reason
    assert sent(bench.join(hello("p3", Role.PREFILL, layout=replace(LAYOUT, page_size=16))), Welcome)
    other = ModelCard("tiny", "beef", 97, 256)
    assert sent(bench.join(hello("p2", Role.PREFILL, model=other)), Refusal)


def test_an_instance_may_not_speak_for_another() -> None:
    bench = pair_bench()
    effects = bench.on(Received(Peer("x", "1"), hello("d0", Role.DECODE, epoch="7")))
    [(to, refusal)] = sent(effects, Refusal)
    assert to == "x" and "d0" in refusal.reason
    assert not sent(effects, Peers)


def test_a_restart_replaces_the_old_life_at_once_and_its_peers_are_told() -> None:
    bench = pair_bench()
    decoding(bench, "a")
    effects = bench.join(hello("d0", Role.DECODE, epoch="2"))
    [(_, peers)] = [each for each in sent(effects, Peers) if each[0] == "p0"]
    assert [(peer.worker, peer.epoch) for peer in peers.peers] == [("d0", "2")]
    assert only_reserve(effects)[1].handle.attempt == 1


def test_a_late_hello_of_a_replaced_life_does_not_bring_it_back() -> None:
    bench = pair_bench()
    bench.join(hello("d0", Role.DECODE, epoch="2"))
    effects = bench.on(Received(Peer("d0", "1"), hello("d0", Role.DECODE, epoch="1")))
    assert effects == []
    assert bench.on(Received(Peer("d0", "1"), Beat(load()))) == []


def test_silence_makes_suspect_and_a_sound_makes_alive_again() -> None:
    bench = pair_bench()
    effects = bench.wait(3.2, beating=["p0"])
    assert bench.brain.missing() == (Role.DECODE,)
    assert told(effects, "p0") is None  # its peers keep it
    bench.submit("a")
    assert isinstance(bench.endings_of("a")[0], End)
    bench.hear("d0", Beat(load()))
    assert bench.brain.missing() == ()
    assert only_reserve(bench.submit("b"))[0] == "d0"


def test_one_that_hangs_up_is_suspect_at_once_and_alive_with_its_next_message() -> None:
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    name, _ = only_reserve(bench.submit("a"))
    for nobody in (Peer("unknown", "1"), Peer(name, "0")):
        assert bench.on(HungUp(nobody)) == []
    elsewhere, again = only_reserve(bench.on(HungUp(bench.lives[name])))
    assert {name, elsewhere} == {"d0", "d1"} and again.handle == Handle("a", 1)
    assert bench.on(HungUp(bench.lives[name])) == [], "it is known"
    bench.on(HungUp(bench.lives[elsewhere]))
    assert bench.brain.missing() == (Role.DECODE,)
    bench.hear(name, Beat(load()))
    assert bench.brain.missing() == ()


def test_when_somebody_hung_up_all_are_told_something_so_that_it_is_known_who() -> None:
    bench = pair_bench()
    assert [name for name, _ in sent(bench.on(HungUp()), Wanted)] == ["p0", "d0"]


def test_longer_silence_is_death_and_that_life_cannot_come_back() -> None:
    bench = pair_bench()
    effects = bench.wait(10.2, beating=["p0"])
    assert told(effects, "p0") == []
    effects = bench.hear("d0", Beat(load()))
    assert sent(effects, WhoAreYou) == [("d0", WhoAreYou())]
    [(to, refusal)] = sent(bench.join(hello("d0", Role.DECODE)), Refusal)
    assert (to, refusal.epoch) == ("d0", "1") and "start it again" in refusal.reason
    assert sent(bench.join(hello("d0", Role.DECODE, epoch="2")), Welcome)


def test_a_colocated_life_that_was_given_up_may_come_back_for_nobody_cut_it_off() -> None:
    bench = Bench()
    bench.join(hello("c0", Role.COLOCATED))
    bench.wait(10.2, beating=[])
    assert sent(bench.join(hello("c0", Role.COLOCATED)), Welcome)


def test_our_own_pause_is_nobodys_silence() -> None:
    bench = pair_bench()
    bench.wait(0.2)
    bench.now += 3600.0
    effects = bench.on(Tick())
    assert bench.brain.missing() == () and not sent(effects, Peers)
    bench.wait(3.2, beating=[])
    assert bench.brain.missing() == (Role.PREFILL, Role.DECODE)


def test_a_stranger_is_asked_who_it_is_but_not_at_every_message() -> None:
    bench = Bench()
    stranger = Peer("d9", "1")
    asked = []
    for _ in range(30):
        bench.now += 0.1
        asked += sent(bench.on(Received(stranger, Beat(load()))), WhoAreYou)
        bench.on(Tick())
    assert 3 <= len(asked) <= 4 and {to for to, _ in asked} == {"d9"}


def test_a_new_life_whose_hello_was_lost_is_asked() -> None:
    bench = pair_bench()
    assert sent(bench.on(Received(Peer("d0", "2"), Beat(load()))), WhoAreYou) == [("d0", WhoAreYou())]


def test_who_says_bye_ends_what_it_runs_and_gets_nothing_new() -> None:
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    name, reserve = only_reserve(bench.submit("a"))
    effects = bench.hear(name, Bye("SIGTERM"))
    assert not sent(effects, Cancel)
    for index in range(4):
        assert only_reserve(bench.submit(f"b{index}"))[0] != name
    bench.reserved(name, reserve.handle)
    bench.first("p0", reserve.handle, 3, 70)
    bench.tokens(name, reserve.handle, 4, 71)
    assert bench.answer_of("a") == [70, 71]
    others = [other for other in bench.lives if other != name]
    effects = bench.wait(3.2, beating=others)
    assert told(effects, "p0") == [other for other in ("d0", "d1") if other != name]
    assert [message.handle.attempt for _, message in sent(effects, Reserve) if message.handle.request_id == "a"] == [1]


def test_one_whose_bye_was_lost_says_with_its_beats_that_it_drains() -> None:
    bench = pair_bench()
    effects = bench.hear("d0", Beat(load(), is_draining=True))
    assert [stamp.what for stamp in effects if isinstance(stamp, Stamp)] == ["draining"]
    assert bench.brain.missing() == (Role.DECODE,)
    effects = bench.hear("d0", Beat(load(), is_draining=True))
    assert [stamp.what for stamp in effects if isinstance(stamp, Stamp)] == []


def test_an_operators_order_to_drain_is_passed_on_and_answered_with_how_far_it_is() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    bench.lives["operator"] = Peer("operator", "e")
    order = DrainInstance("d0", "by hand")
    effects = bench.hear("operator", order)
    assert sent(effects, DrainInstance) == [("d0", order)]
    assert sent(effects, DrainReport) == [("operator", DrainReport("d0", 1, 0, is_gone=False))]
    bench.hear("d0", Bye("by hand"))
    bench.tokens("d0", handle, 4, 71, 72, 73)
    assert bench.answer_of("a") == [70, 71, 72, 73]
    bench.join(hello("d1", Role.DECODE))
    effects = bench.hear("operator", order)
    assert sent(effects, DrainReport) == [("operator", DrainReport("d0", 0, 1, is_gone=False))]
    bench.hear("d0", Bye("by hand", is_gone=True))
    effects = bench.hear("operator", order)
    assert sent(effects, DrainReport) == [("operator", DrainReport("d0", 0, 0, is_gone=True))]


def test_an_unknown_instance_cannot_be_drained_and_the_known_are_named() -> None:
    bench = pair_bench()
    bench.lives["operator"] = Peer("operator", "e")
    effects = bench.hear("operator", DrainInstance("d7", "by hand"))
    assert effects == [Send("operator", Refusal("no instance is named d7; there are: d0, p0"))]


def test_peers_are_said_again_now_and_then() -> None:
    bench = pair_bench()
    effects = bench.wait(11.0)
    assert len([1 for to, _ in sent(effects, Peers) if to == "p0"]) == 2


def test_the_card_has_the_smallest_limit_of_the_living() -> None:
    bench = Bench()
    assert bench.brain.card() is None
    bench.join(hello("p0", Role.PREFILL))
    assert bench.brain.card() == CARD
    small = ModelCard("tiny", "f00d", 97, 100)
    bench.join(hello("d0", Role.DECODE, model=small), hello("d1", Role.DECODE))
    assert bench.brain.card() == small


def test_state_tells_who_lives_and_is_plain() -> None:
    bench = pair_bench()
    decoding(bench, "a")
    bench.wait(0.1)
    state = bench.brain.state()
    assert state["requests"] == {"queued": 0, "reserving": 0, "prefilling": 0, "handing": 0, "decoding": 1}
    instances = state["instances"]
    assert isinstance(instances, list)
    assert [(each["name"], each["standing"], each["num_assigned"]) for each in instances] == [
        ("p0", "alive", 1),
        ("d0", "alive", 1),
    ]


def test_thousands_come_and_go_and_little_is_remembered() -> None:
    bench = pair_bench()
    for epoch in range(2, 6000):
        bench.lives["d0"] = Peer("d0", str(epoch))
        bench.brain.on(Received(bench.lives["d0"], hello("d0", Role.DECODE, epoch=str(epoch))), bench.now)
    bench.brain.check()
    assert len(bench.brain._members._ended) <= 4096


def test_load_beyond_what_we_gave_weighs_too() -> None:
    """It is left over from another life of the router."""
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    bench.hear("d0", Beat(load(num_running=5)))
    assert [only_reserve(bench.submit(str(i)))[0] for i in range(5)] == ["d1"] * 5
    assert only_reserve(bench.submit("last"))[0] == "d0"


def test_nothing_is_sent_to_the_dead() -> None:
    bench = pair_bench()
    decoding(bench, "a")
    effects = bench.wait(10.2, beating=["p0"])
    assert "d0" not in [e.to for e in bench.wait(1.0, beating=["p0"]) if isinstance(e, Send)]
    assert sent(effects, Cancel)  # while it was only suspect


def parted(bench: Bench, decode: str, reserve: Reserve) -> list[Effect]:
    reason = f"{reserve.prefill} was cut off from {decode}"
    return bench.hear(decode, Refused(reserve.handle, reason, 1.0, is_parted=True))


def test_a_pair_that_can_meet_no_more_is_not_made_again_and_both_serve_with_others() -> None:
    bench = pair_bench()
    bench.join(hello("p1", Role.PREFILL), hello("d1", Role.DECODE))
    name, reserve = only_reserve(bench.submit("a"))
    assert (name, reserve.prefill) == ("d0", "p0")
    name, reserve = only_reserve(parted(bench, "d0", reserve))
    assert (name, reserve.prefill) == ("d1", "p0")
    bench.lives.pop("d1")
    bench.wait(10.5)  # d1 dies
    assert only_reserve(bench.submit("b"))[1].prefill == "p1"
    assert bench.brain.missing() == ()


def test_who_is_cut_off_from_all_must_start_again() -> None:
    bench = pair_bench()
    _, reserve = only_reserve(bench.submit("a"))
    parted(bench, "d0", reserve)
    effects = bench.wait(0.1)
    [(to, refusal)] = sent(effects, Refusal)
    assert (to, refusal.epoch) == ("p0", "1") and "cut off from every" in refusal.reason
    assert told(effects, "d0") == []
    assert bench.brain.missing() == (Role.PREFILL,)
    effects = bench.join(hello("p0", Role.PREFILL, epoch="2"))
    assert only_reserve(effects)[1].prefill_epoch == "2"


def barred(bench: Bench, decode: str, reserve: Reserve) -> list[Effect]:
    return bench.hear(decode, Refused(reserve.handle, "64 heads there, 8 here", None, is_parted=True))


def test_a_pair_between_whom_nothing_can_be_moved_is_made_once_and_others_serve() -> None:
    bench = pair_bench()
    bench.join(hello("p1", Role.PREFILL), hello("d1", Role.DECODE))
    name, reserve = only_reserve(bench.submit("a"))
    assert (name, reserve.prefill) == ("d0", "p0")
    effects = barred(bench, "d0", reserve)
    name, reserve = only_reserve(effects)
    assert (name, reserve.prefill) == ("d1", "p0")
    assert [(each.subject, each.detail) for each in effects if isinstance(each, Stamp) and each.what == "barred"] == [
        ("p0", "from d0: 64 heads there, 8 here")
    ]
    name, reserve = only_reserve(barred(bench, "d1", reserve))
    assert (reserve.prefill, reserve.handle.request_id) == ("p1", "a") and bench.endings_of("a") == []
    assert sent(bench.wait(20.0), Refusal) == [], "a new life could do no better"


def test_where_no_two_can_serve_together_requests_are_refused_at_once_saying_why() -> None:
    bench = pair_bench()
    _, reserve = only_reserve(bench.submit("a"))
    barred(bench, "d0", reserve)
    bench.submit("b")
    why = "p0 and d0 cannot serve together: 64 heads there, 8 here"
    for ending in bench.endings_of("a") + bench.endings_of("b"):
        assert isinstance(ending, End) and (ending.status, ending.reason) == (503, why)
    assert len(bench.endings_of("a")) == len(bench.endings_of("b")) == 1
    instances: Any = bench.brain.state()["instances"]
    assert [each["cannot_meet"] for each in instances] == [{"d0": why}, {}]
    assert bench.brain.why_none_meet() == why
    bench.submit("one", max_tokens=1)  # prefill alone serves that
    assert bench.endings_of("one") == []
    effects = bench.join(hello("d0", Role.DECODE, epoch="2"))
    assert sent(effects, Reserve) == []
    assert only_reserve(bench.submit("c"))[0] == "d0" and bench.brain.why_none_meet() is None


def test_those_that_waited_when_no_two_turned_out_to_serve_together_are_told_with_the_first() -> None:
    bench = pair_bench()
    _, first = only_reserve(bench.submit("a"))
    _, second = only_reserve(bench.submit("b"))
    bench.hear("d0", Refused(second.handle, "p0 is not attached", 0.1))
    bench.submit("one", max_tokens=1)
    barred(bench, "d0", first)
    why = "p0 and d0 cannot serve together: 64 heads there, 8 here"
    assert [ending.reason for name in "ab" for ending in bench.endings_of(name) if isinstance(ending, End)] == [why] * 2
    assert bench.endings_of("one") == []


def test_a_new_life_of_decode_can_meet_whom_the_old_one_cut_off() -> None:
    bench = pair_bench()
    _, reserve = only_reserve(bench.submit("a"))
    parted(bench, "d0", reserve)
    effects = bench.join(hello("d0", Role.DECODE, epoch="2"))
    assert only_reserve(effects)[1].prefill_epoch == "1"


def test_one_that_says_it_is_gone_is_gone_at_once() -> None:
    bench = pair_bench()
    effects = bench.on(Received(Peer("d0", "1"), Bye("rank 0 was ended by SIGKILL", is_gone=True)))
    assert [name for name, _ in sent(effects, Peers)] == ["p0"]
    assert sent(effects, Peers)[0][1].peers == ()
    assert Stamp("d0", "left", "rank 0 was ended by SIGKILL") in effects
