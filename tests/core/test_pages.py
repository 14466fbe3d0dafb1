"""The page pool and its prefix cache: counts are owners, a prefix is exact, eviction takes what nobody needs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.runtime.core.pages import PagePool, PageTable, num_pages_for
from pd.runtime.core.prefix import PrefixCache

SIZE = 4


def cache_of(num_pages: int, *, enabled: bool = True) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), SIZE, enabled=enabled)


def filled(cache: PrefixCache, tokens: tuple[int, ...]) -> PageTable:
    """A request that matched what it could, computed the rest, and had it cached."""
    table = cache.match(tokens)
    pages = cache.grow(table, num_pages_for(len(tokens), SIZE) - len(table.pages))
    assert pages is not None
    cache.insert(table, tokens, len(tokens))
    return table


def test_taking_is_all_or_none_and_pages_come_back_in_order() -> None:
    pool = PagePool(5)
    first = pool.take(3)
    assert first == [0, 1, 2]
    assert pool.take(3) is None
    assert pool.num_free == 2
    for page in reversed(first):
        assert pool.drop(page) == 0
    assert pool.take(5) == [0, 1, 2, 3, 4]
    assert pool.take(0) == []


def test_a_page_given_back_twice_is_a_bug_that_is_seen() -> None:
    pool = PagePool(2)
    pool.take(1)
    pool.drop(0)
    with pytest.raises(AssertionError, match="page 0 is given back twice"):
        pool.drop(0)
    with pytest.raises(AssertionError, match="nobody owns it"):
        pool.hold(1)


def test_a_quarantined_page_is_neither_free_nor_held() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    assert pages is not None
    pool.quarantine(pages)
    pool.check({})
    assert (pool.num_free, pool.num_quarantined) == (1, 2)
    assert pool.take(2) is None
    pool.readmit(pages)
    pool.check({})
    assert pool.num_free == 3


def test_check_sees_a_lost_page_and_a_wrong_owner() -> None:
    pool = PagePool(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="page 0: count 1, 0 owners"):
        pool.check({})
    with pytest.raises(AssertionError, match="page 1: count 0, 1 owners"):
        pool.check({0: 1, 1: 1})


@pytest.mark.parametrize(
    ("num_tokens", "num_matched"), [(1, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)]
)
def test_a_match_is_whole_pages_and_leaves_a_token_to_compute(num_tokens: int, num_matched: int) -> None:
    cache = cache_of(16)
    known = tuple(range(12))
    cache.release(filled(cache, known))
    table = cache.match((known + tuple(range(50, 60)))[:num_tokens])
    assert len(table.pages) == num_matched
    cache.check([table])


def test_the_same_page_after_another_beginning_is_another_page() -> None:
    cache = cache_of(16)
    one = filled(cache, (1, 1, 1, 1, 2, 2, 2, 2, 9))
    other = cache.match((3, 3, 3, 3, 2, 2, 2, 2, 9))
    assert other.pages == []
    assert cache.match((1, 1, 1, 1, 2, 2, 2, 2, 9)).pages == one.pages[:2]


def test_a_page_is_not_cached_before_it_is_full() -> None:
    cache = cache_of(8)
    table = PageTable()
    cache.grow(table, 3)
    tokens = tuple(range(11))
    for num_computed, num_cached in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)):
        cache.insert(table, tokens, num_computed)
        assert cache.num_cached == num_cached
        cache.check([table])


def test_two_that_computed_the_same_keep_their_own_pages() -> None:
    cache = cache_of(16)
    tokens = tuple(range(9))
    one, two = PageTable(), PageTable()
    for table in (one, two):
        cache.grow(table, 3)
    cache.insert(one, tokens, 8)
    cache.insert(two, tokens, 8)
    cache.check([one, two])
    assert (one.num_shared, two.num_shared, cache.num_cached) == (2, 0, 2)
    cache.release(two)
    assert cache.match(tokens).pages == one.pages[:2]


def test_the_longest_unused_page_is_evicted_and_a_held_one_never() -> None:
    cache = cache_of(4)
    old, new = (1,) * 4, (2,) * 4
    cache.release(filled(cache, old))
    cache.release(filled(cache, new))
    cache.release(cache.match((*old, 0)))  # used again: now `new` is the longest unused
    table = PageTable()
    assert cache.grow(table, 3) is not None
    assert cache.match((*new, 0)).pages == []
    held = cache.match((*old, 0))
    assert len(held.pages) == 1
    assert cache.grow(table, 1) is None
    cache.check([table, held])


def test_a_prefix_is_evicted_from_its_end() -> None:
    cache = cache_of(3)
    tokens = tuple(range(12))
    cache.release(filled(cache, tokens))
    table = PageTable()
    for num_left in (2, 1, 0):
        cache.grow(table, 1)
        assert cache.num_cached == num_left
        matched = cache.match((*tokens, 0))
        assert len(matched.pages) == num_left
        cache.check([table, matched])
        cache.release(matched)


def test_without_caching_it_is_a_plain_pool() -> None:
    cache = cache_of(4, enabled=False)
    cache.release(filled(cache, (1,) * 8))
    assert (cache.num_cached, cache.num_available) == (0, 4)
    assert cache.match((1,) * 9).pages == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(1, 24), alphabet=st.integers(1, 3))
def test_counts_and_contents_hold_whatever_requests_do(seed: int, num_pages: int, alphabet: int) -> None:
    dice = random.Random(seed)
    cache = cache_of(num_pages)
    contents: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end, as last computed
    live: list[tuple[PageTable, tuple[int, ...]]] = []
    for _ in range(60):
        if live and dice.random() < 0.5:
            table, tokens = live.pop(dice.randrange(len(live)))
            if dice.random() < 0.5:
                cache.insert(table, tokens, dice.randrange(len(tokens) + 1))
            cache.release(table)
        else:
            tokens = tuple(dice.randrange(alphabet) for _ in range(dice.randrange(1, 5 * SIZE)))
            table = cache.match(tokens)
            for index, page in enumerate(table.pages):
                assert contents[page] == tokens[: (index + 1) * SIZE], f"page {page} is not that prefix"
            if cache.grow(table, num_pages_for(len(tokens), SIZE) - len(table.pages)) is None:
                cache.release(table)
                continue
            for index, page in enumerate(table.pages):
                contents[page] = tokens[: (index + 1) * SIZE]
            cache.insert(table, tokens, dice.randrange(len(tokens) + 1))
            live.append((table, tokens))
        cache.check(table for table, _ in live)
    for table, _ in live:
        cache.release(table)
    cache.check([])
    assert cache.num_available == num_pages
