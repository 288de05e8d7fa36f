"""The free list."""

import pytest

from sgray.memory.pages import PageAllocator


def test_all_pages_are_free_at_the_start_and_each_is_given_out_once() -> None:
    pages = PageAllocator(5)
    assert pages.num_free == 5
    taken = pages.allocate(3) + pages.allocate(2)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pages.num_free == 0 and pages.free_pages == frozenset()


def test_a_freed_page_is_given_out_again() -> None:
    pages = PageAllocator(2)
    one, other = pages.allocate(2)
    pages.free([other])
    assert pages.free_pages == {other}
    assert pages.allocate(1) == [other]
    assert pages.allocate(0) == []
    pages.free([one, other])
    assert pages.num_free == 2


def test_freeing_twice_is_refused() -> None:
    pages = PageAllocator(2)
    taken = pages.allocate(1)
    pages.free(taken)
    with pytest.raises(AssertionError, match="free already"):
        pages.free(taken)


def test_more_than_is_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError):
        PageAllocator(2).allocate(3)
