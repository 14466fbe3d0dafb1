"""The client dates what a server of known timing sends, to 2 ms or 2 %, and names what goes wrong."""

from __future__ import annotations

import asyncio

import pytest

from pd.bench.load.asks import Ask, Conversation, Form
from pd.bench.load.drive import Drive, Traffic
from pd.bench.load.goals import Goals
from pd.bench.load.http import Server
from pd.bench.load.metrics import summarize
from pd.bench.load.outcome import INTERRUPTED, Outcome
from tests.bench.servers import Say, Script, Synthetic, serving

FORM = Form(model="synthetic", chat=False, ignore_eos=True, extra={})
CHAT = Form(model="synthetic", chat=True, ignore_eos=False, extra={})
STEADY = Script([Say(0.1), *[Say(0.02)] * 9])


def near(value: float | None, wanted: float) -> bool:
    assert value is not None
    return abs(value - wanted) <= max(0.002, 0.02 * wanted)


def asks(num: int, *, every_s: float = 0.0, num_answer: int = 10) -> list[tuple[float, Conversation]]:
    return [(index * every_s, Conversation((Ask((1, 2, 3), num_answer),))) for index in range(num)]


async def drive(synthetic: Synthetic, traffic: Traffic, form: Form = FORM) -> tuple[Drive, float]:
    server = Server(synthetic.url)
    run = Drive(server, form, traffic)
    try:
        return run, await run.run()
    finally:
        server.close()


async def one(script: Script, form: Form = FORM, timeout_s: float = 5.0) -> Outcome:
    async with serving(script) as synthetic:
        run, _ = await drive(synthetic, Traffic(arrivals=asks(1), timeout_s=timeout_s), form)
    return run.live.outcomes[0]


def assert_dated(run: Drive, synthetic: Synthetic) -> None:
    """Every chunk to 2 ms of when it was written, but for the moments the machine was elsewhere."""
    off = [
        abs(seen + run.start - wrote)
        for outcome, times in zip(run.live.outcomes, synthetic.wrote, strict=True)
        for seen, wrote in zip(outcome.chunks_s, times, strict=True)
    ]
    assert sorted(off)[len(off) * 9 // 10] < 0.002


@pytest.mark.parametrize("form", [FORM, CHAT], ids=["completions", "chat"])
async def test_steady_tokens_have_their_times(form: Form) -> None:
    async with serving(STEADY) as synthetic:
        run, _ = await drive(synthetic, Traffic(arrivals=asks(1)), form)
    assert_dated(run, synthetic)
    (outcome,), (wrote,) = run.live.outcomes, synthetic.wrote
    assert outcome.error is None
    assert near(outcome.ttft_s, wrote[0] - run.start)
    assert near(outcome.tpot_s, (wrote[-1] - wrote[0]) / 9)
    assert near(outcome.e2e_s, wrote[-1] - run.start)
    assert outcome.ttft_s is not None and outcome.ttft_s >= 0.1
    assert len(outcome.gaps_s) == 9
    assert (outcome.num_prompt, outcome.num_answer, outcome.finish) == (7, 10, "length")


async def test_a_chunk_of_several_tokens_is_one_gap_and_all_its_tokens() -> None:
    async with serving(Script([Say(0.05, 1), Say(0.04, 4), Say(0.04, 5)])) as synthetic:
        run, _ = await drive(synthetic, Traffic(arrivals=asks(1)))
    (outcome,), (wrote,) = run.live.outcomes, synthetic.wrote
    assert [near(gap, wrote[i + 1] - wrote[i]) for i, gap in enumerate(outcome.gaps_s)] == [True, True]
    assert outcome.num_tokens == 10
    assert near(outcome.tpot_s, (wrote[-1] - wrote[0]) / 9)


async def test_a_stall_is_one_long_gap() -> None:
    outcome = await one(Script([Say(0.02), Say(0.01), Say(0.3), Say(0.01)]))
    assert 0.294 < max(outcome.gaps_s) < 0.4
    assert sum(gap > 0.15 for gap in outcome.gaps_s) == 1


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(status=429), "status 429"),
        (Script([Say(0.01)], break_off=True), "disconnected"),
        (Script([Say(0.01)], error="out of memory"), "error in stream"),
        (Script([]), "empty answer"),
        (Script(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\ndata:"), "empty answer"),
        (Script(raw=b"nonsense\r\n\r\n"), "malformed answer"),
        (Script(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\ndata: {x}\n\n"), "malformed stream"),
        (Script([Say(0.6)]), "timeout"),
    ],
)
async def test_what_goes_wrong_is_named(script: Script, error: str) -> None:
    outcome = await one(script, timeout_s=0.3)
    assert outcome.error == error


async def test_a_server_that_is_gone_is_named() -> None:
    async with serving(STEADY) as synthetic:
        pass
    run, _ = await drive(synthetic, Traffic(arrivals=asks(1)))
    assert run.live.outcomes[0].error == "no connection"


async def test_an_open_loop_sends_what_is_due_whatever_is_still_open() -> None:
    """Each answer takes 0.28 s and one is due every 10 ms: a loop that waited would take 11 s."""
    async with serving(STEADY) as synthetic:
        run, seconds = await drive(synthetic, Traffic(arrivals=asks(40, every_s=0.01)))
    assert_dated(run, synthetic)
    found = summarize(run.live.outcomes, Goals(), seconds=seconds)
    assert found.num_ok == 40
    assert seconds < 2.0
    assert found.late.p50 < 0.005


async def test_a_server_that_stops_for_a_while_is_charged_to_all_who_were_due() -> None:
    """The first answer blocks the server for 0.3 s: with coordinated omission one request would have been slow."""
    import time

    def script(number: int, body: dict[str, object]) -> Script:
        if number == 0:
            time.sleep(0.3)
        return Script([Say(0.0)])

    async with serving(script) as synthetic:
        run, _ = await drive(synthetic, Traffic(arrivals=asks(20, every_s=0.01, num_answer=1)))
    ttfts = [outcome.ttft_s for outcome in run.live.outcomes]
    assert sum(ttft is not None and ttft > 0.1 for ttft in ttfts) >= 18


async def test_a_closed_loop_keeps_so_many_open() -> None:
    most = 0
    open_now = 0

    async with serving(Script([Say(0.05), Say(0.02)])) as synthetic:
        server = Server(synthetic.url)
        run = Drive(server, FORM, Traffic(arrivals=asks(12, num_answer=2), concurrency=3))
        task = asyncio.create_task(run.run())
        while not task.done():
            open_now = len(run.live.open)
            most = max(most, open_now)
            await asyncio.sleep(0.005)
        seconds = task.result()
        server.close()
    assert most == 3
    assert 4 * 0.07 <= seconds < 1.0
    assert all(outcome.error is None for outcome in run.live.outcomes)


async def test_a_further_turn_brings_what_was_said() -> None:
    talk = Conversation((Ask((1, 2), 2), Ask((3,), 2, think_s=0.05)))
    async with serving(Script([Say(0.01), Say(0.01)])) as synthetic:
        run, seconds = await drive(synthetic, Traffic(arrivals=[(0.0, talk)]), CHAT)
    first, second = synthetic.bodies
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]  # type: ignore[attr-defined, union-attr, index]
    assert second["messages"][:1] == first["messages"]  # type: ignore[index]
    assert second["messages"][1]["content"] == " word word"  # type: ignore[index]
    assert near(run.live.outcomes[1].due_s, run.live.outcomes[0].chunks_s[-1] + 0.05)
    assert near(run.live.outcomes[1].ttft_s, synthetic.wrote[1][0] - run.start - run.live.outcomes[1].due_s)
    assert 0.02 + 0.05 + 0.02 <= seconds < 0.5


async def test_stopped_it_keeps_what_has_ended_and_leaves_the_rest() -> None:
    def script(number: int, body: dict[str, object]) -> Script:
        return STEADY if number == 0 else Script([Say(0.02)] * 200)

    async with serving(script) as synthetic:
        server = Server(synthetic.url)
        run = Drive(server, FORM, Traffic(arrivals=asks(5)))
        task = asyncio.create_task(run.run())
        while run.live.num_ended < 1:
            await asyncio.sleep(0.01)
        run.stop()
        seconds = await task
        server.close()
        await asyncio.sleep(0.1)
    found = summarize(run.live.outcomes, Goals(), seconds=seconds)
    assert (found.num_ok, found.num_interrupted, found.errors) == (1, 4, {})
    assert [outcome.error for outcome in run.live.outcomes] == [None] + [INTERRUPTED] * 4
    assert synthetic.num_left == 4


async def test_goodput_counts_those_that_met_every_goal() -> None:
    def script(number: int, body: dict[str, object]) -> Script:
        if number % 4 == 0:
            return Script([Say(0.15), *[Say(0.01)] * 4])  # too late a start
        if number % 4 == 1:
            return Script([Say(0.02), *[Say(0.05)] * 4])  # too slow a pace
        return Script(status=503) if number % 4 == 2 else Script([Say(0.02), *[Say(0.01)] * 4])

    async with serving(script) as synthetic:
        run, seconds = await drive(synthetic, Traffic(arrivals=asks(20, every_s=0.005, num_answer=5)))
    found = summarize(run.live.outcomes, Goals(ttft_s=0.1, tpot_s=0.03), seconds=seconds)
    assert found.attainment == 5 / 20
    assert found.goodput_s is not None and near(found.goodput_s * seconds, 5)
    assert found.errors == {"status 503": 5}
