"""Which pages of the key-value pool are free. Knows ids and counts, not what a page holds or who has it."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """The free list of page ids `0 .. num_pages - 1`. All operations take time in the pages named, not in the pool."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, num_pages
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """How many pages nobody owns."""
        return len(self._free)

    @property
    def free_pages(self) -> frozenset[int]:
        """The ids that nobody owns; takes time in the pool's size."""
        return frozenset(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages out of the free list; there must be as many."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back; each must be allocated."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = 1
            self._free.append(page)
