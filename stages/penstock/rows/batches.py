"""Which packed rows make up which optimizer step, for any number of replicas.

The order is a function of (seed, epoch) alone, and a step is a set of rows chosen before anyone
asks how many replicas share the work; so the layout never changes what is learnt from, and a
position in the data is one number: steps taken.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Batches:
    """Steps over `num_rows` packed rows, `rows_per_step` at a time, reshuffled every epoch."""

    num_rows: int
    rows_per_step: int
    seed: int
    last_batch: str
    """`drop`: a last batch that is not full is left out, unless it is all there is; `keep`."""

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.rows_per_step < 1:
            raise ValueError(f"{self.num_rows} rows in steps of {self.rows_per_step}")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data."""
        whole, rest = divmod(self.num_rows, self.rows_per_step)
        return whole + 1 if rest and (self.last_batch == "keep" or not whole) else whole

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, in which the step numbered `step`, from 0, lies."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """All rows of the step numbered `step`, from 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, self.num_rows)
        start = index * self.rows_per_step
        return order[start : start + self.rows_per_step].tolist()


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """The epoch's order. Kept, because drawing it anew for each step costs a pass over all rows."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)


def share(rows: list[int], replica: int, num_replicas: int) -> list[int]:
    """The rows that one of `num_replicas` computes; their numbers differ by one at most."""
    return rows[replica::num_replicas]


def micro_batches(rows: list[int], size: int, count: int) -> list[list[int]]:
    """`rows` in exactly `count` groups of `size`; groups may be short or empty at the end.

    Every replica makes the same number of passes, or collectives would wait for ever.
    """
    if len(rows) > size * count:
        raise ValueError(f"{len(rows)} rows do not fit {count} micro-batches of {size}")
    return [rows[i * size : (i + 1) * size] for i in range(count)]
