"""A decode brain holds the prefixes of what landed or was decoded: the ticket names only the pages to be sent."""

from __future__ import annotations

import pytest
from brains import EPOCH, PAGE, Instance, answer, hello, reserve_for, said, sample, streamed

from pd.runtime.core.events import Peer
from pd.runtime.wire.messages import Fenced, Landed, Reserve, Reserved
from pd.runtime.wire.plans import Severed
from pd.runtime.wire.values import Role, Ticket, Token

P = Peer("p", EPOCH)


def decoder(*, page_size: int = PAGE, **changes: int) -> Instance:
    """Attached to one prefill instance whose pages have `page_size` tokens."""
    me = Instance(Role.DECODE, **changes)
    me.meet(hello("p", Role.PREFILL, page_size=page_size))
    return me


def reserve(me: Instance, tokens: tuple[int, ...], *, name: str, max_tokens: int = 4) -> tuple[Reserve, Ticket]:
    like = reserve_for(name, 1, life=P, max_tokens=max_tokens)
    request = Reserve(like.handle, tokens, len(tokens), like.sampling, *P, deadline_s=30.0)
    (reserved,) = said(me.router(request), Reserved)
    return request, reserved.ticket


def serve(me: Instance, request: Reserve, ticket: Ticket) -> tuple[int, ...]:
    """Land it, let all end, and return its tokens."""
    me.ranks.receive(request.tokens, ticket)
    me.peer(P, Landed(request.handle, len(request.tokens), Token(sample(request.tokens)), len(ticket.pages)))
    me.settle()
    tokens, finish = answer(request, 64)
    assert streamed(me.effects, request.handle) == (tokens[1:], finish)
    return tokens


@pytest.mark.parametrize(("num_alike", "held"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_whole_pages_of_a_landed_prompt_are_held_for_the_next(num_alike: int, held: int) -> None:
    me = decoder()
    prompt = tuple(range(9))
    serve(me, *reserve(me, prompt, name="a"))
    other = prompt[:num_alike] + (20,) * (11 - num_alike)
    request, ticket = reserve(me, other, name="b")
    assert (ticket.held_tokens, len(ticket.pages)) == (held, 3 - held // PAGE)
    serve(me, request, ticket)
    assert me.brain.is_idle()


def test_the_last_token_is_always_sent_so_that_something_is_computed() -> None:
    me = decoder()
    prompt = tuple(range(8))
    serve(me, *reserve(me, prompt, name="a"))
    _, ticket = reserve(me, prompt, name="b")
    assert (ticket.held_tokens, len(ticket.pages)) == (4, 1)


def test_what_was_decoded_is_held_for_the_next_turn_of_a_conversation() -> None:
    me = decoder()
    prompt = tuple(range(6))
    tokens = serve(me, *reserve(me, prompt, name="a", max_tokens=8))
    turn = (*prompt, *tokens, 3, 1)
    request, ticket = reserve(me, turn, name="b")
    assert ticket.held_tokens == 12  # of 6 + 8, all but the last of which were computed
    serve(me, request, ticket)


def test_held_tokens_are_whole_pages_of_the_writer_too() -> None:
    me = decoder(page_size=3 * PAGE)
    prompt = tuple(range(22))
    serve(me, *reserve(me, prompt, name="a"))
    _, ticket = reserve(me, prompt, name="b")
    assert (ticket.held_tokens, len(ticket.pages)) == (12, 3)  # 20 are here, 12 are whole pages of 12


def test_a_prefix_is_shared_while_both_run_and_survives_the_first() -> None:
    me = decoder(num_pages=8)
    prompt = tuple(range(9))
    first, one = reserve(me, prompt, name="a", max_tokens=12)
    me.ranks.receive(prompt, one)
    me.peer(P, Landed(first.handle, 9, Token(sample(prompt)), 3))
    second, two = reserve(me, prompt, name="b", max_tokens=12)
    assert two.held_tokens == 8
    me.ranks.receive(prompt, two)
    me.peer(P, Landed(second.handle, 9, Token(sample(prompt)), 1))
    me.settle()
    for request in (first, second):
        tokens, finish = answer(request, 64)
        assert streamed(me.effects, request.handle) == (tokens[1:], finish)


def test_a_writer_that_cannot_be_severed_has_only_its_own_pages_quarantined() -> None:
    me = decoder(num_pages=8)
    prompt = tuple(range(9))
    serve(me, *reserve(me, prompt, name="a"))
    _, ticket = reserve(me, (*prompt[:8], 7, 7, 7, 7, 7), name="b")
    assert len(ticket.pages) == 2
    me.meet(hello("p", Role.PREFILL, epoch="2"))
    me.rank(Severed(*P, clean=False))
    assert me.brain.load().num_free_pages == 8 - len(ticket.pages)  # its 14th token needs no fifth page
    request = reserve_for("c", 1, life=Peer("p", "2"))
    again = Reserve(request.handle, prompt, 9, request.sampling, "p", "2", deadline_s=30.0)
    assert said(me.router(again), Reserved)[0].ticket.held_tokens == 8
    me.peer(Peer("p", "2"), Fenced(request.handle, "ended"))
    me.wait(3.0)
    me.rank(Severed(*P, clean=True))
    assert me.brain.is_idle()
