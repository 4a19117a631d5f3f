"""How long a run that goes on from its checkpoint was in coming back."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

READING_ROWS = "reading rows"
"""What a step begins with."""


def recovery_of(beginnings: Sequence[tuple[str, float]], now: float) -> dict[str, float]:
    """Seconds from the start of the process to the end of its first step, which is `now`: of each
    phase before that step, of the step, and of all.

    `beginnings` are the phases of the process with the times at which they began.
    """
    before = [(phase, at) for phase, at in beginnings if phase != READING_ROWS]
    step = next((at for phase, at in beginnings if phase == READING_ROWS), now)
    marks = [*((phase, at) for phase, at in before if at < step), ("first step", step), ("", now)]
    found: dict[str, float] = defaultdict(float)
    for (phase, start), (_, end) in pairwise(marks):
        found[phase.replace(" ", "_")] += end - start
    found["all"] = now - marks[0][1]
    return {phase: round(seconds, 3) for phase, seconds in found.items()}
