"""Rows filled to the last token: exact completion on the histogram of lengths.

The longest sample left opens a row, and one, two or three lengths that fill it exactly complete it;
that pattern is repeated until one of its lengths is used up. Which lengths are left is one large
integer with a bit for each, so that all pairs of a given sum are found by one shift and one AND.
"""

from collections import Counter
from collections.abc import Callable

from penstock.rows.bin_plan import Indices
from penstock.rows.packing.patterns import Patterns

TRIES = 16
"""Longest lengths tried as the first of three."""

Choose = Callable[[int, int], int]
"""Of a set of lengths, as bits, and the sum of a pair, the longer one of the pair to take."""


def longest(lengths: int, total: int) -> int:
    """The longest: what is left then is as even as can be."""
    del total
    return lengths.bit_length() - 1


def evenest(lengths: int, total: int) -> int:
    """The one nearest to half of the pair: the shortest lengths are kept for later."""
    half = (total + 1) // 2
    upper = lengths >> half
    return half + (upper & -upper).bit_length() - 1


def exact_fit(counts: Indices, capacity: int, choose: Choose) -> Patterns:
    """The plan for `counts[length]` samples of each length from 1 to `capacity`.

    Where nothing completes a row, it takes the longest that fits, and what is left stays free.
    """
    stock = _Stock(counts.tolist(), capacity, choose)
    plan = Patterns()
    while stock.lengths:
        pattern = Counter(_fill(stock, capacity))
        again = min(stock.counts[length] // each for length, each in pattern.items())
        held = 0
        for length, each in pattern.items():
            stock.take(length, again * each)
            plan.placed.append((length, plan.num_rows, again + 1, each, held))
            held += each
        stock.forget(pattern)
        plan.num_rows += again + 1
    return plan


def _fill(stock: "_Stock", capacity: int) -> list[int]:
    """The lengths of one row, taken from the stock."""
    pattern: list[int] = []
    room = capacity
    while room and (top := stock.fitting(room)):
        if top < room and 3 * top >= room and (found := stock.pair(room) or stock.triple(room)):
            taken = [*found]
        else:
            # Too much room for three: leave as much as three of this length can fill.
            taken = [top] * max(1, min(stock.counts[top], -(-room // top) - 3))
        for length in taken:
            stock.take(length, 1)
        pattern += taken
        room -= sum(taken)
    return pattern


class _Stock:
    """The samples that are left."""

    def __init__(self, counts: list[int], capacity: int, choose: Choose) -> None:
        self.counts = counts
        self.lengths = 0
        """Bit n: there may be samples of length n; those just taken are dropped by `forget`."""
        self._mirrored = 0
        """Bit `capacity - n`, so that a shift lays n beside the length that completes it."""
        self._capacity = capacity
        self._choose = choose
        for length, count in enumerate(counts):
            if count:
                self.lengths |= 1 << length
                self._mirrored |= 1 << (capacity - length)

    def take(self, length: int, count: int) -> None:
        """Use `count` samples of a length."""
        self.counts[length] -= count

    def forget(self, lengths: Counter[int]) -> None:
        """Stop offering those of the lengths that are used up."""
        for length in lengths:
            if not self.counts[length]:
                self.lengths ^= 1 << length
                self._mirrored ^= 1 << (self._capacity - length)

    def fitting(self, room: int) -> int:
        """The longest length that fits, 0 if none does."""
        lengths = self.lengths & ((2 << room) - 1)
        while lengths:
            top = lengths.bit_length() - 1
            if self.counts[top]:
                return top
            lengths ^= 1 << top
        return 0

    def pair(self, room: int) -> tuple[int, int] | None:
        """Two lengths that fill the room."""
        found = self.lengths & (self._mirrored >> (self._capacity - room))
        while found:
            one = self._choose(found, room)
            other = room - one
            if self.counts[one] and self.counts[other] > (one == other):
                return one, other
            found &= ~(1 << one | 1 << other)
        return None

    def triple(self, room: int) -> tuple[int, int, int] | None:
        """Three lengths that fill the room, the first one of the longest that fit."""
        lengths = self.lengths & ((2 << room) - 1)
        for _ in range(TRIES):
            first = lengths.bit_length() - 1
            if 3 * first < room:
                return None
            lengths ^= 1 << first
            if not self.counts[first]:
                continue
            self.counts[first] -= 1
            found = self.pair(room - first)
            self.counts[first] += 1
            if found:
                return first, *found
        return None
