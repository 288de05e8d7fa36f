"""The memory in which the ranks of one node exchange small tensors: how it is laid out, and where it lies. No Triton.

    signals   one line of 32 words for each program: in word r what rank r has told last, in the last word, which only
              the owner uses, how often the program has met the others
    rooms     two for each program, used in turn

A program of a kernel meets the program of its number on the other ranks and no other one, and what they show each other
is in the rooms of that number. So whoever is in its call n + 1 has left call n, and whoever has met all others in call
n + 1 may write again where they have read in call n. That is why two rooms suffice, and no call ends with a meeting.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LINE_WORDS = 32  # 128 bytes, so that what is told to two programs is not in one line of the cache
MAX_RANKS = LINE_WORDS - 1


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the memories of all ranks begin, as this rank sees them; each of `memory_bytes` and zero at the beginning.

    `addresses_R` (ranks,) int64 is on the device that runs the kernels; addresses are multiples of 128. All programs of
    a call wait at the same time, so the device must be able to run `num_programs` of them at once. `owner` keeps
    the memory alive.
    """

    rank: int
    addresses_R: Tensor
    num_programs: int
    room_bytes: int
    owner: object = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.addresses_R.shape[0]

    def programs_for(self, num_elements: int, smallest_block: int) -> tuple[int, int]:
        """How many programs share so many elements, and a power of two that is enough for each."""
        block = smallest_block
        while block * self.num_programs < num_elements:
            block *= 2
        return -(-num_elements // block), block


def memory_bytes(num_programs: int, room_bytes: int) -> int:
    """What each rank has to give."""
    assert room_bytes % 128 == 0, room_bytes
    return num_programs * (4 * LINE_WORDS + 2 * room_bytes)
