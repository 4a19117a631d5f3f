"""Exact bin packing: rows without a free token, on the histogram of lengths; best of several plans.

The longest remaining sample opens a row, and one, two or three lengths fill it exactly; the pattern
is repeated until one of its lengths is used up. The remaining lengths are a bit set in one large
integer, so one shift and one AND find all pairs with a given sum.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from penstock.rows.bin_plan import Indices
from penstock.rows.packing.best_fit import Patterns, best_fit

TRIES = 16
"""How many of the longest lengths are tried as the first of three."""

Choose = Callable[[int, int], int]
"""(bit set of lengths, sum of a pair) -> the longer length of the pair to use."""


def longest(lengths: int, total: int) -> int:
    """The longest length: the remaining lengths then stay as even as possible."""
    del total
    return lengths.bit_length() - 1


def evenest(lengths: int, total: int) -> int:
    """The length nearest to half of the sum: the shortest lengths are kept for later."""
    half = (total + 1) // 2
    upper = lengths >> half
    return half + (upper & -upper).bit_length() - 1


EXACT_CHOICES = (longest, evenest)


def search_best(
    counts: Indices, capacity: int, enough: int, choices: Sequence[Choose] = EXACT_CHOICES
) -> Patterns:
    """The plan with the fewest rows for `counts[length]` samples of each length: of best fit
    decreasing, and of `exact_fit` with each of `choices`. The search stops at `enough` rows."""
    best = best_fit(counts, (), capacity)
    for choose in choices:
        if best.num_rows <= enough:
            break
        patterns = exact_fit(counts, capacity, choose)
        # If large samples determine the number of rows, exact filling does not help: if the first
        # exact plan is no better, the second one is skipped.
        if patterns.num_rows >= best.num_rows:
            break
        best = patterns
    return best


def exact_fit(counts: Indices, capacity: int, choose: Choose) -> Patterns:
    """Plan for `counts[length]` samples of each length from 1 to `capacity`.

    A row that cannot be filled exactly takes the longest length that fits, until none does.
    """
    stock = _Stock(counts.tolist(), capacity, choose)
    plan = Patterns()
    while stock.lengths:
        pattern = Counter(_fill(stock, capacity))
        # How often more: `_fill` has taken the samples of the first row.
        again = min(stock.counts[length] // count for length, count in pattern.items())
        held = 0
        for length, count in pattern.items():
            stock.take(length, again * count)
            plan.placed.append((length, plan.num_rows, again + 1, count, held))
            held += count
        stock.forget(pattern)
        plan.num_rows += again + 1
    return plan


def _fill(stock: "_Stock", capacity: int) -> list[int]:
    pattern: list[int] = []
    room = capacity
    while room and (top := stock.fitting(room)):
        if top < room and 3 * top >= room and (lengths := stock.pair(room) or stock.triple(room)):
            taken_lengths = [*lengths]
        else:
            # Too much room for three samples: leave what three of this length can fill.
            taken_lengths = [top] * max(1, min(stock.counts[top], -(-room // top) - 3))
        for length in taken_lengths:
            stock.take(length, 1)
        pattern += taken_lengths
        room -= sum(taken_lengths)
    return pattern


class _Stock:
    """The remaining samples."""

    def __init__(self, counts: list[int], capacity: int, choose: Choose) -> None:
        self.counts = counts
        self.lengths = 0
        """Bit n: samples of length n may remain; `forget` clears the bits of used-up lengths."""
        self._mirrored = 0
        """Bit `capacity - n`, so that a shift aligns n with the length that completes it."""
        self._capacity = capacity
        self._choose = choose
        for length, count in enumerate(counts):
            if count:
                self.lengths |= 1 << length
                self._mirrored |= 1 << (capacity - length)

    def take(self, length: int, count: int) -> None:
        self.counts[length] -= count

    def forget(self, lengths: Counter[int]) -> None:
        for length in lengths:
            if not self.counts[length]:
                self.lengths ^= 1 << length
                self._mirrored ^= 1 << (self._capacity - length)

    def fitting(self, room: int) -> int:
        # Bits 0 to `room`.
        lengths = self.lengths & ((2 << room) - 1)
        while lengths:
            top = lengths.bit_length() - 1
            if self.counts[top]:
                return top
            lengths ^= 1 << top
        return 0

    def pair(self, room: int) -> tuple[int, int] | None:
        candidates = self.lengths & (self._mirrored >> (self._capacity - room))
        while candidates:
            first = self._choose(candidates, room)
            second = room - first
            if self.counts[first] and self.counts[second] > (first == second):
                return first, second
            candidates &= ~(1 << first | 1 << second)
        return None

    def triple(self, room: int) -> tuple[int, int, int] | None:
        """Three lengths that sum to `room`; the first is one of the `TRIES` longest that fit."""
        lengths = self.lengths & ((2 << room) - 1)
        for _ in range(TRIES):
            first = lengths.bit_length() - 1
            # The first is the longest of three, so shorter ones cannot fill the room.
            if 3 * first < room:
                return None
            lengths ^= 1 << first
            if not self.counts[first]:
                continue
            self.counts[first] -= 1
            pair = self.pair(room - first)
            self.counts[first] += 1
            if pair:
                return first, *pair
        return None
