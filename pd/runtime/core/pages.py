"""Which page of the KV pool belongs to whom: reference counts, and the page table of one request. Pure.

Rules
1. A page is free (count 0), referenced (count above 0) or quarantined; never two of these.
2. A page's count is the number of page tables and prefix-cache entries that hold it.
3. Whoever takes pages gives back exactly those; `check` finds the one who did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    def are_referenced(self, pages: Iterable[int]) -> bool:
        return all(map(self._counts.__getitem__, pages))

    def is_kept(self, page: int) -> bool:
        """Referenced or quarantined: it will not be given to anybody else."""
        return self._counts[page] > 0 or page in self._quarantined

    def check(self, owners: Mapping[int, int]) -> None:
        """Raise AssertionError unless the counts are `owners` (0 where silent) and no page is missing."""
        counts, free = self._counts, self._free
        wanted = [0] * self.num_pages
        for page, count in owners.items():
            wanted[page] = count
        if counts != wanted:
            page = next(page for page in range(self.num_pages) if counts[page] != wanted[page])
            raise AssertionError(f"page {page}: count {counts[page]}, {wanted[page]} owners")
        assert len(set(free)) == len(free), "a page is free twice"
        assert not any(map(counts.__getitem__, free)), f"free and referenced: {[p for p in free if counts[p]]}"
        assert self._quarantined.isdisjoint(free), "a quarantined page is free"
        assert not any(map(counts.__getitem__, self._quarantined)), "a quarantined page is referenced"
        num_unowned = counts.count(0)
        assert len(free) + len(self._quarantined) == num_unowned, (
            f"{len(free)} free + {len(self._quarantined)} quarantined is not the {num_unowned} that nobody holds"
        )
