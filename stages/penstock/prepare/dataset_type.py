"""Infer the type of a data set without `type`, cached by its content.

The inferred type is part of the cache key, as if it were set. Readers are imported only for new
data, so a finished pipeline starts without pyarrow and numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.schema.dataset import DatasetConfig, FormatName
from penstock.core.cache.digest_cache import cached_value
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source
from penstock.core.errors import CapabilityError, StageError

# Number of records used for inference; a column may be null in the first ones.
INFER_RECORDS = 20

NO_CONVERSATION = ("text", "tokenized")
"""Types whose records have no messages, and so no images."""

VERSION = 4
"""Increase it if another format must be inferred for the same records."""


@dataclass(frozen=True)
class InferredType:
    """An inferred format, with `field_` settings for columns with other than default names."""

    type: FormatName
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    columns: str = ""
    """The columns from which the format was inferred, for messages."""

    def settings(self) -> dict[str, Any]:
        """The equivalent data set settings."""
        return {"type": self.type, **self.fields}

    def __str__(self) -> str:
        more = "".join(f", {name}: {value}" for name, value in self.fields.items())
        return f"type: {self.type}{more} (its records have {self.columns})"


def infer_dataset_type(
    dataset: DatasetConfig,
    source: Source,
    *,
    location: str,
    objective: str,
    token: bool | None,
    max_record_bytes: int,
) -> InferredType | None:
    """Infer the format of a source from its first records; None if it has no records or the hub
    cannot be reached, for which the prepare stage has better errors.

    `location` is the data set's section in the config. Raises ConfigError with the columns if no
    format or several fit.
    """
    named = {
        name: value
        for name in sorted(dataset.model_fields_set)
        if name.startswith("field_") and (value := getattr(dataset, name)) is not None
    }
    cache_key = digest_json([VERSION, source.key, dataset.ds_type, named, objective, INFER_RECORDS])

    def infer() -> Any:
        from penstock.prepare.infer_type import infer_format, read_first  # noqa: PLC0415

        records = read_first(source, dataset.ds_type, token, max_record_bytes)
        if not records:
            raise StageError("it has no records")
        inferred = infer_format(records, named, objective=objective, location=location)
        return [inferred.type, dict(inferred.fields), inferred.columns]

    try:
        return InferredType(*cached_value(cache_key, infer))
    except (StageError, CapabilityError, FileNotFoundError):
        return None
