"""Encode the first records of a source without running the prepare stage, for `penstock check`."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.core.errors import ConfigError
from penstock.prepare.bad_records import DROP_REASONS, BadRecord
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.infer_type import infer_format
from penstock.prepare.settings import DatasetSettings


@dataclass(frozen=True)
class FirstSamples:
    """Counts of the first records and their samples."""

    records: int
    samples: int
    tokens: int
    trained_tokens: int
    longest: int
    """Tokens of the longest sample; for pairs, of the longer side."""
    bad: int
    """Unusable records; the prepare stage fails unless `data.bad_rows_allowed` allows them."""
    faults: tuple[str, ...]
    """Why records have no sample, without duplicates."""
    hint: str
    """Hint with the inferred type, if it differs from the configured one."""


def first_samples(
    records: list[dict[str, Any]],
    settings: DatasetSettings,
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, ...] | None = None,
) -> FirstSamples:
    """Encode records as the prepare stage does. Raises as `Encoder`."""
    values: list[dict[str, Any] | BadRecord] = list(records)
    found = Encoder(settings, tokenizer, columns)(values)
    faults = list(found.faults.values())
    return FirstSamples(
        records=len(records),
        samples=len(found.records),
        tokens=int(sum(side.lengths.sum() for side in found.sides)),
        trained_tokens=int(sum(side.count_trained().sum() for side in found.sides)),
        longest=max((int(side.lengths.max(initial=0)) for side in found.sides), default=0),
        bad=sum(fault.reason not in DROP_REASONS for fault in faults),
        faults=tuple(dict.fromkeys(fault.why for fault in faults)),
        hint=_hint(records, settings) if faults else "",
    )


def _hint(records: list[dict[str, Any]], settings: DatasetSettings) -> str:
    try:
        looks = infer_format(records, {}, objective="", where="")
    except ConfigError:
        return ""
    return "" if looks.type == settings.type else f".\n  They look like {looks}"
