"""The inferred type of a data set whose `type` is not written, remembered by its content.

The type is used as if it had been written, so it is part of the key of prepared data. Readers are
imported only for data that is new: a finished pipeline starts without pyarrow and numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.schema.dataset import DatasetConfig, FormatName
from penstock.core.cache.digests import cached_value
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source
from penstock.core.errors import CapabilityError, StageError

INFER_RECORDS = 20
"""Records that are looked at: a column may be null in the first."""

VERSION = 4
"""Raised when the same records are inferred to have another format."""


@dataclass(frozen=True)
class InferredType:
    """A format, and the columns to read where they have other names than usual."""

    type: FormatName
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    columns: str = ""
    """The columns that the format was inferred from."""

    def settings(self) -> dict[str, Any]:
        """The settings of a data set that say the same."""
        return {"type": self.type, **self.fields}

    def __str__(self) -> str:
        more = "".join(f", {name}: {value}" for name, value in self.fields.items())
        return f"type: {self.type}{more} (its records have {self.columns})"


def infer_dataset_type(
    dataset: DatasetConfig, source: Source, *, where: str, objective: str, token: bool | None
) -> InferredType | None:
    """The format of a source by its first records; None where there is no record to look at, or
    the hub cannot be reached, which preparing reports better.

    `where` is the data set's place in the configuration. Raises ConfigError that shows the columns
    where several formats or none fit.
    """
    named = _named_fields(dataset)
    asked = digest_json([VERSION, source.key, dataset.ds_type, named, objective, INFER_RECORDS])

    def infer() -> Any:
        from penstock.prepare.infer_type import infer_format, read_first  # noqa: PLC0415

        records = read_first(source, dataset.ds_type, token)
        if not records:
            raise StageError("it has no records")
        found = infer_format(records, named, objective=objective, where=where)
        return [found.type, dict(found.fields), found.columns]

    try:
        return InferredType(*cached_value(asked, infer))
    except (StageError, CapabilityError, FileNotFoundError):
        return None


def _named_fields(dataset: DatasetConfig) -> dict[str, str]:
    """The `field_` settings that are written."""
    return {
        name: value
        for name in sorted(dataset.model_fields_set)
        if name.startswith("field_") and (value := getattr(dataset, name)) is not None
    }
