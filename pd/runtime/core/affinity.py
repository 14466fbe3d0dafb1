"""Which prompts the router sent where, so that a prompt goes where its beginning is cached. Pure.

It is a guess about the instances' own prefix caches, and only ever decides between instances that all could
serve: a wrong guess costs the recomputing of a prefix, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_HASHED_PAGES = 512
"""A longer prompt is compared by its first this many pages: hashing them takes about 0.2 ms."""


def page_hashes(tokens: Sequence[int], page_size: int) -> tuple[int, ...]:
    """One hash for each whole page, each over everything up to its end."""
    hashes = []
    last = 0
    stop = min(len(tokens) // page_size, MAX_HASHED_PAGES) * page_size
    for start in range(0, stop, page_size):
        last = hash((last, tuple(tokens[start : start + page_size])))
        hashes.append(last)
    return tuple(hashes)


class PrefixMemory:
    """Page hashes of prompts sent to one instance, as many as it has pages; the longest unused goes first."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def num_matching(self, hashes: Sequence[int]) -> int:
        """Leading pages that were sent here before."""
        for index, page in enumerate(hashes):
            if page not in self._pages:
                return index
        return len(hashes)

    def remember(self, hashes: Sequence[int]) -> None:
        for page in reversed(hashes):  # so that of one prompt the tail is forgotten first
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._max_pages:
            self._pages.popitem(last=False)
