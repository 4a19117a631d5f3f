"""The default length of packed rows (without `data.sample_packing_sequence_len`).

A pure function of counts recorded in prepared data, so the same data always gives the same rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

WANTED_ROWS = 512
"""Minimum rows per epoch, if the longest sample allows it: with fewer, usual batch sizes leave too
few optimizer steps."""

SHORTEST = 128
"""Default multiple to which rows are padded when they are loaded (`data.pad_to_multiple_of`);
shorter rows would save nothing."""

RowLength = Literal["written", "fitted"]


@dataclass(frozen=True)
class SampleSizes:
    """Sample sizes of prepared data."""

    longest: int
    """Upper bound on a sample's tokens in a row, from a power-of-two histogram."""
    tokens: int
    """Number of tokens of one epoch."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "SampleSizes":
        """Build from the facts of the prepare stage."""
        rows, tokens = facts["rows"]["train"], facts["tokens"]["train"]
        drawn = facts.get("samples_per_epoch") or rows
        lengths = [upper for of_split in facts["lengths"].values() for upper in of_split]
        return cls(_longest(lengths, facts["kind"]), tokens * drawn // max(1, rows))

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> "SampleSizes":
        """Build from plan.json; the same data gives the same sizes as `of_facts`."""
        train = plan["splits"]["train"]
        rows, tokens = (sum(entry[name] for entry in train) for name in ("rows", "tokens"))
        sources = plan.get("sources", [])
        drawn = sum(source["drawn"] for source in sources if source["role"] == "train") or rows
        entries = [entry for of_split in plan["splits"].values() for entry in of_split]
        lengths = [upper for entry in entries for upper in entry["lengths"]]
        return cls(_longest(lengths, plan["kind"]), tokens * drawn // max(1, rows))


def fitted_row_length(sizes: SampleSizes, most: int, multiple: int = SHORTEST) -> int:
    """Row length in tokens: a power of two that fits the longest sample and, if possible, gives an
    epoch at least `WANTED_ROWS` rows. Rounded up to a `multiple`, to which rows are padded; at most
    `most`."""
    for_rows = 1 << max(0, (sizes.tokens // WANTED_ROWS).bit_length() - 1)
    length = max(SHORTEST, sizes.longest, for_rows)
    return min(most, -(-length // multiple) * multiple)


def _longest(uppers: Iterable[str], kind: str) -> int:
    """The largest upper bound of a length histogram; doubled for preference data, because a pair
    takes up to twice the tokens of its longer side."""
    return max(map(int, uppers), default=1) * (1 if kind == "sft" else 2)
