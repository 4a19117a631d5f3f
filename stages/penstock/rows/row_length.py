"""The default length of packed rows (without `data.sample_packing_sequence_len`).

A pure function of counts recorded in prepared data, so the same data always gives the same rows.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Minimum rows per epoch, if the longest sample allows it: with fewer, usual batch sizes leave too
# few optimizer steps.
WANTED_ROWS = 512

# Default multiple to which rows are padded when they are loaded (`data.pad_to_multiple_of`);
# shorter rows would save nothing.
SHORTEST = 128

# Minimum mean samples and tokens of an optimizer step, if an epoch then has `STEPS_KEPT` steps:
# steps of single short samples are noisy, and most of their time is overhead.
STEP_SAMPLES, STEP_TOKENS = 8, 512

STEPS_KEPT = 30

# Maximum tokens of a row that is lengthened for `STEP_SAMPLES`: activations grow with it.
LONGEST_FOR_STEP = 4096

RowLength = Literal["written", "fitted"]


@dataclass(frozen=True)
class SampleSizes:
    """Sample sizes of prepared data."""

    longest: int
    """Upper bound on a sample's tokens in a row, from a power-of-two histogram."""
    tokens: int
    """Number of tokens of one epoch."""
    samples: int = 0
    """Number of samples of one epoch."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "SampleSizes":
        """Build from the facts of the prepare stage."""
        rows, tokens = facts["rows"]["train"], facts["tokens"]["train"]
        drawn = facts.get("samples_per_epoch") or rows
        lengths = [upper for of_split in facts["lengths"].values() for upper in of_split]
        return cls(_longest(lengths, facts["kind"]), tokens * drawn // max(1, rows), drawn)

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> "SampleSizes":
        """Build from plan.json; the same data gives the same sizes as `of_facts`."""
        train = plan["splits"]["train"]
        rows, tokens = (sum(entry[name] for entry in train) for name in ("rows", "tokens"))
        sources = plan.get("sources", [])
        drawn = sum(source["drawn"] for source in sources if source["role"] == "train") or rows
        entries = [entry for of_split in plan["splits"].values() for entry in of_split]
        lengths = [upper for entry in entries for upper in entry["lengths"]]
        return cls(_longest(lengths, plan["kind"]), tokens * drawn // max(1, rows), drawn)


def fitted_row_length(
    sizes: SampleSizes, most: int, multiple: int = SHORTEST, rows_per_step: int | None = None
) -> int:
    """Row length in tokens: a power of two that fits the longest sample and, if possible, gives an
    epoch at least `WANTED_ROWS` rows; longer if steps of `rows_per_step` such rows would be too
    small. Rounded up to a `multiple`, to which rows are padded; at most `most`."""
    for_rows = 1 << max(0, (sizes.tokens // WANTED_ROWS).bit_length() - 1)
    length = max(SHORTEST, sizes.longest, for_rows)
    length = -(-length // multiple) * multiple
    if rows_per_step is not None and sizes.samples:
        length = max(length, _length_for_step(sizes, multiple, rows_per_step))
    return min(most, length)


def _length_for_step(sizes: SampleSizes, multiple: int, rows_per_step: int) -> int:
    """Tokens of a row, of which `rows_per_step` are a step of `STEP_SAMPLES` and `STEP_TOKENS`, or
    as near to it as an epoch of `STEPS_KEPT` steps allows."""
    target_tokens = max(STEP_TOKENS, STEP_SAMPLES * sizes.tokens / sizes.samples) / rows_per_step
    target_tokens = math.ceil(min(target_tokens, LONGEST_FOR_STEP) / multiple)
    return multiple * min(target_tokens, sizes.tokens // (STEPS_KEPT * rows_per_step) // multiple)


def _longest(uppers: Iterable[str], kind: str) -> int:
    """The largest upper bound of a length histogram; doubled for preference data, because a pair
    takes up to twice the tokens of its longer side."""
    return max(map(int, uppers), default=1) * (1 if kind == "sft" else 2)
