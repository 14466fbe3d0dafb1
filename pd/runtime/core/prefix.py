"""The KV pool seen with its prefix cache: pages of finished prompts stay until somebody needs the room. Pure.

A cached page is found by (the entry of the page before it, the tokens in it): a chain from the first token
on, compared token by token, so two prefixes are never mistaken for one another.

Rules
1. Only whole pages are cached, and only after the step that filled them is done.
2. Who holds an entry's page holds those of all entries before it. So an entry that nobody holds has only such
   descendants, and since tables are given back from their end, the longest unused entry never has a child.
3. A match leaves at least one token to compute: its logits are the answer's first token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pd.runtime.core.pages import PagePool, PageTable


@dataclass(slots=True, eq=False)
class _Entry:
    number: int  # never used again, so that a key cannot outlive its parent
    page: int
    key: tuple[int, tuple[int, ...]]  # (the parent's number or 0, the page's tokens)
    parent: _Entry | None
    num_children: int = 0


class PrefixCache:
    """Gives out and takes back page tables. With `enabled` false it keeps no page, and is a plain pool."""

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.page_size = page_size
        self._enabled = enabled
        self._by_key: dict[tuple[int, tuple[int, ...]], _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody else; longest unused first
        self._last_number = 0
        self.num_released = 0
        """Grows whenever pages come back: whoever found too few need not look again before."""

    @property
    def num_available(self) -> int:
        """Pages that `grow` can give, evicting if it must."""
        return self.pool.num_free + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._by_page)

    def grow(self, table: PageTable, num_pages: int) -> tuple[int, ...] | None:
        """Append `num_pages` to `table`, all or none, evicting the longest unused. Returns the new pages."""
        if num_pages > self.num_available:
            return None
        while self.pool.num_free < num_pages:
            self._evict()
        pages = self.pool.take(num_pages)
        assert pages is not None, "fewer free pages than were just counted"
        table.pages += pages
        return tuple(pages)

    def match(self, tokens: Sequence[int]) -> PageTable:
        """A table with the longest cached prefix of `tokens`, short of the last token. The caller owns it."""
        table = PageTable()
        entry: _Entry | None = None
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            key = (entry.number if entry else 0, tuple(tokens[start : start + self.page_size]))
            entry = self._by_key.get(key)
            if entry is None:
                break
            self.pool.hold(entry.page)
            self._idle.pop(entry.page, None)
            table.pages.append(entry.page)
        table.num_shared = len(table.pages)
        return table

    def insert(self, table: PageTable, tokens: Sequence[int], num_computed: int) -> None:
        """Cache the pages that the first `num_computed` of `tokens` fill. Repeat it as more are computed."""
        if not self._enabled or table.is_private:
            return
        size = self.page_size
        parent = self._by_page[table.pages[table.num_shared - 1]] if table.num_shared else None
        while (table.num_shared + 1) * size <= num_computed:
            start = table.num_shared * size
            key = (parent.number if parent else 0, tuple(tokens[start : start + size]))
            if key in self._by_key:
                table.is_private = True  # another computed the same meanwhile; rule 2 forbids to continue theirs
                return
            parent = self._add(table.pages[table.num_shared], key, parent)
            table.num_shared += 1

    def release(self, table: PageTable) -> None:
        """Give a table's pages back and empty it. Cached ones stay until evicted."""
        for page in reversed(table.pages):
            if self.pool.drop(page) == 1 and page in self._by_page:
                self._idle[page] = None
        self.num_released += len(table.pages)
        table.pages.clear()
        table.num_shared = 0

    def trim(self, table: PageTable, num_pages: int) -> None:
        """Give back all but the first `num_pages` of what `match` found."""
        rest = PageTable(table.pages[num_pages:])
        del table.pages[num_pages:]
        table.num_shared = min(table.num_shared, num_pages)
        self.release(rest)

    def quarantine(self, table: PageTable) -> None:
        """Set aside a table's own pages, and give back those it shares: no peer was promised them.

        It keeps the numbers of its own for `readmit`.
        """
        shared = PageTable(table.pages[: table.num_shared])
        del table.pages[: table.num_shared]
        table.num_shared = 0
        self.release(shared)
        self.pool.quarantine(table.pages)

    def readmit(self, table: PageTable) -> None:
        """Free a quarantined table's pages and empty it."""
        self.pool.readmit(table.pages)
        self.num_released += len(table.pages)
        table.pages.clear()

    def check(self, tables: Iterable[PageTable]) -> None:
        """Raise AssertionError unless `tables` and the cache are exactly who holds the pool's pages."""
        tables = list(tables)
        held: dict[int, int] = {}
        for table in tables:
            for page in table.pages:
                held[page] = held.get(page, 0) + 1
        cached = self._by_page
        if not cached:
            self.pool.check(held)
            assert not self._idle and not any(table.num_shared for table in tables), "shared, but nothing is cached"
            return
        self.pool.check(held | {page: held.get(page, 0) + 1 for page in cached})
        assert self._idle.keys() == cached.keys() - held.keys(), f"idle pages {sorted(self._idle)}, held {sorted(held)}"
        self._check_entries(held)
        for table in tables:
            shared = table.pages[: table.num_shared]
            assert cached.keys() >= set(shared), f"shared, but not cached: {shared}"

    def _check_entries(self, held: Mapping[int, int]) -> None:
        children: dict[int, int] = {}
        for page, entry in self._by_page.items():
            parent = entry.parent
            assert self._by_key[entry.key] is entry, f"cached page {page} cannot be found"
            if parent:
                children[parent.page] = children.get(parent.page, 0) + 1
                assert page not in held or parent.page in held, f"page {page} is held without its parent"
        for page, entry in self._by_page.items():
            assert entry.num_children == children.get(page, 0), f"cached page {page} miscounts its children"

    def _add(self, page: int, key: tuple[int, tuple[int, ...]], parent: _Entry | None) -> _Entry:
        self._last_number += 1
        entry = _Entry(self._last_number, page, key, parent)
        self._by_key[key] = entry
        self._by_page[page] = entry
        if parent:
            parent.num_children += 1
        self.pool.hold(page)
        return entry

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        entry = self._by_page.pop(page)
        assert not entry.num_children, f"page {page} would be evicted before its children"
        del self._by_key[entry.key]
        if entry.parent:
            entry.parent.num_children -= 1
        self.pool.drop(page)
