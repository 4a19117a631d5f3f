"""The length of packed rows where the configuration does not say it: chosen from the samples.

A pure function of counts that prepared data carries, so that the same data always gives the same
rows, whoever asks and whenever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

WANTED_ROWS = 512
"""Rows of an epoch, at least, where the longest sample allows it: with fewer, batches of usual
sizes leave too few optimizer steps."""

SHORTEST = 128
"""Rows are padded to a multiple of this when they are loaded, unless `data.pad_to_multiple_of` says
another, so shorter ones save nothing."""

RowLength = Literal["written", "fitted"]


@dataclass(frozen=True)
class SampleSizes:
    """How large the samples of prepared data are."""

    longest: int
    """Tokens that no sample exceeds in a row, a power of two."""
    tokens: int
    """Tokens of one epoch."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "SampleSizes":
        """From the facts of the prepare stage."""
        rows, tokens = facts["rows"]["train"], facts["tokens"]["train"]
        drawn = facts.get("samples_per_epoch") or rows
        lengths = [upper for of_split in facts["lengths"].values() for upper in of_split]
        return cls(_longest(lengths, facts["kind"]), tokens * drawn // max(1, rows))

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any]) -> "SampleSizes":
        """From plan.json, which says the same of the same data."""
        train = plan["splits"]["train"]
        rows, tokens = (sum(entry[name] for entry in train) for name in ("rows", "tokens"))
        sources = plan.get("sources", [])
        drawn = sum(source["drawn"] for source in sources if source["role"] == "train") or rows
        entries = [entry for of_split in plan["splits"].values() for entry in of_split]
        lengths = [upper for entry in entries for upper in entry["lengths"]]
        return cls(_longest(lengths, plan["kind"]), tokens * drawn // max(1, rows))


def fitted_row_length(sizes: SampleSizes, most: int, multiple: int = SHORTEST) -> int:
    """Tokens of a row: a power of two that holds the longest sample and gives an epoch at least
    `WANTED_ROWS` rows, if the longest sample is not in the way; rounded up to a `multiple`, which
    rows are padded to; never over `most`."""
    for_rows = 1 << max(0, (sizes.tokens // WANTED_ROWS).bit_length() - 1)
    length = max(SHORTEST, sizes.longest, for_rows)
    return min(most, -(-length // multiple) * multiple)


def _longest(uppers: Iterable[str], kind: str) -> int:
    """The largest upper bound of a histogram of lengths. In a row a pair of answers takes up to
    twice what its longer side takes."""
    return max(map(int, uppers), default=1) * (1 if kind == "sft" else 2)
