"""Two bin packing searches: a fast one, and one that takes the best of several plans."""

from penstock.rows.bin_plan import Indices
from penstock.rows.packing.best_fit import Patterns, best_fit
from penstock.rows.packing.exact import evenest, exact_fit, longest


def best_fit_only(counts: Indices, capacity: int, enough: int) -> Patterns:
    """Best fit decreasing only; `enough` is ignored."""
    del enough
    return best_fit(counts, (), capacity)


def search_best(counts: Indices, capacity: int, enough: int) -> Patterns:
    """The plan with the fewest rows among several, for `counts[length]` samples of each length.

    The search stops at `enough` rows.
    """
    best = best_fit(counts, (), capacity)
    # If large samples determine the number of rows, exact filling does not help: if the first exact
    # plan is no better, the second one is skipped.
    for choose in (longest, evenest):
        if best.num_rows <= enough:
            break
        patterns = exact_fit(counts, capacity, choose)
        if patterns.num_rows >= best.num_rows and choose is longest:
            break
        best = min(best, patterns, key=lambda plan: plan.num_rows)
    return best
