"""Two searches for a plan with few rows: a quick one, and one that takes the best of several."""

from penstock.rows.bin_plan import Indices
from penstock.rows.packing.exact import evenest, exact_fit, longest
from penstock.rows.packing.patterns import Patterns, best_fit


def quickly(counts: Indices, capacity: int, enough: int) -> Patterns:
    """Best fit decreasing alone, however many rows that makes."""
    del enough
    return best_fit(counts, (), capacity)


def tightest(counts: Indices, capacity: int, enough: int) -> Patterns:
    """The plan with the fewest rows of several for `counts[length]` samples of each length.

    The search ends at `enough` rows.
    """
    best = best_fit(counts, (), capacity)
    # Where large samples alone decide, filling rows exactly gains nothing: the first such plan says
    # so by being no better, and the others are left out.
    for choose in (longest, evenest):
        if best.num_rows <= enough:
            break
        found = exact_fit(counts, capacity, choose)
        if found.num_rows >= best.num_rows and choose is longest:
            break
        best = min(best, found, key=lambda plan: plan.num_rows)
    return best
