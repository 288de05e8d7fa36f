"""Which replicas hold which pages: one set of bits a page. Knows pages by hash and replicas by number, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class CachePicture:
    """Page hash -> bits of the replicas that hold it or will. Takes memory in the pages that anybody holds."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def own(self, bit: int, pages: Iterable[int]) -> None:
        """The replica with this bit holds these pages."""
        owners = self._owners
        for page in pages:
            owners[page] = owners.get(page, 0) | bit

    def disown(self, bit: int, pages: Iterable[int]) -> None:
        """It no longer does."""
        owners = self._owners
        for page in pages:
            left = owners.get(page, 0) & ~bit
            if left:
                owners[page] = left
            else:
                owners.pop(page, None)

    def match(self, hashes: list[int], among: int) -> dict[int, int]:
        """Replica number -> how many leading pages it holds, for those of `among` (bits) that hold the first one.

        Takes time in the pages and in the replicas that match, however many others there are.
        """
        depths: dict[int, int] = {}
        alive, owners = among, self._owners
        for depth, page in enumerate(hashes):
            left = alive & owners.get(page, 0)
            if left != alive:
                if depth:
                    depths.update(dict.fromkeys(numbers(alive & ~left), depth))
                alive = left
                if not alive:
                    return depths
        if hashes:
            depths.update(dict.fromkeys(numbers(alive), len(hashes)))
        return depths

    def as_dict(self) -> dict[int, int]:
        """All of it, for proofs."""
        return dict(self._owners)


def numbers(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
