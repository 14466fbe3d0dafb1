"""Which page of the KV pool belongs to whom: reference counts, and the page table of one request. Pure.

Rules
1. A page is free (count 0), referenced (count above 0) or quarantined; never two of these.
2. A page's count is the number of page tables and prefix-cache entries that hold it.
3. Whoever takes pages gives back exactly those; `check` finds the one who did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens`, the last one perhaps in part."""
    return -(-num_tokens // page_size)


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one request in the order of its tokens. Empty once released."""

    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # leading pages that are in the prefix cache by way of this table
    is_private: bool = False  # another request's page stands for the same tokens: nothing further is shared


class PagePool:
    """Counts of every page. Gives out the page given back last, which is the likeliest to be in a cache."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def take(self, num_pages: int) -> list[int] | None:
        """Pages with count 1, all or none."""
        if num_pages > len(self._free):
            return None
        pages = self._free[: -num_pages - 1 : -1]  # ascending where possible: neighbours move in one copy
        del self._free[len(self._free) - num_pages :]
        for page in pages:
            self._counts[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more reference to a page that has one already."""
        assert self._counts[page] > 0, f"page {page} is held, but nobody owns it"
        self._counts[page] += 1

    def drop(self, page: int) -> int:
        """One reference less; the count that is left. At 0 the page is free."""
        count = self._counts[page] - 1
        assert count >= 0, f"page {page} is given back twice"
        self._counts[page] = count
        if not count:
            self._free.append(page)
        return count

    def quarantine(self, pages: Sequence[int]) -> None:
        """Set pages aside that have exactly one owner: neither free nor anyone's until `readmit`."""
        for page in pages:
            assert self._counts[page] == 1, f"page {page} with {self._counts[page]} owners: no quarantine"
            self._counts[page] = 0
            self._quarantined.add(page)

    def readmit(self, pages: Sequence[int]) -> None:
        """Quarantined pages are free again."""
        for page in pages:
            self._quarantined.remove(page)
            self._free.append(page)

    def is_referenced(self, page: int) -> bool:
        return self._counts[page] > 0

    def check(self, owners: Mapping[int, int]) -> None:
        """Raise AssertionError unless the counts are `owners` (0 where silent) and no page is missing."""
        for page, count in enumerate(self._counts):
            assert count == owners.get(page, 0), f"page {page}: count {count}, {owners.get(page, 0)} owners"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        referenced = {page for page, count in enumerate(self._counts) if count}
        assert not free & referenced, f"free and referenced: {sorted(free & referenced)}"
        assert not self._quarantined & (free | referenced), "a quarantined page is in use"
        assert len(free) + len(referenced) + len(self._quarantined) == self.num_pages, (
            f"{len(free)} free + {len(referenced)} referenced + {len(self._quarantined)} quarantined "
            f"is not {self.num_pages}"
        )
