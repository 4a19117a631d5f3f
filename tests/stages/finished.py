"""Tokenized slices made of tokens at hand, for tests of what comes after tokenizing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.config.schema.dataset import FormatName, Kind
from penstock.core.cache.record import digest_json
from penstock.prepare.bad_records import Tally
from penstock.prepare.settings import DatasetSettings, PrepareSettings
from penstock.prepare.slices import Role, Slice, TokenizedSlice
from penstock.rows.schema import PREPARED_SCHEMAS, histogram

TYPES: dict[Kind, FormatName] = {"sft": "tokenized", "preference": "preference", "kto": "kto"}


def settings(num_datasets: int = 1, kind: Kind = "sft", **more: Any) -> PrepareSettings:
    """Settings of a run over `num_datasets` sources of a kind."""
    its = DatasetSettings(type=TYPES[kind])
    return PrepareSettings(datasets=(its,) * num_datasets, **more)


def finished(
    folder: Path,
    samples: Sequence[Sequence[int]],
    role: Role = "train",
    dataset: int = 0,
    kind: Kind = "sft",
    name: str = "",
) -> TokenizedSlice:
    """A slice of these samples, all of whose tokens are trained; of a pair, both sides are one
    list with None between them, and before the tokens of a judged answer stands whether it is
    good."""
    columns = {column: [] for column in PREPARED_SCHEMAS[kind].names}
    for row, tokens in enumerate(samples):
        for column, value in _record(list(tokens), kind).items():
            columns[column].append(value)
        columns["source"].append(f"source-{dataset}")
        columns["row"].append(row)
    key = digest_json([role, dataset, name, [list(tokens) for tokens in samples]])[:16]
    path = folder / f"{key}.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = PREPARED_SCHEMAS[kind]
    if not path.exists():
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for start in range(0, len(samples), 7):  # several batches, the last one shorter
                part = {name: values[start : start + 7] for name, values in columns.items()}
                writer.write_batch(_batch(part, schema))
    its = DatasetSettings(type=TYPES[kind])
    item = Slice(key, key, role, dataset, f"source-{dataset}", its, None, ())
    lengths = [len(tokens) for tokens in samples]
    tally = Tally(
        records=len(samples),
        rows=len(samples),
        tokens=sum(lengths),
        trained_tokens=sum(lengths) - len(samples),
    )
    tally.lengths.update(histogram(np.array(lengths)))
    return item, path, tally


def _record(tokens: list, kind: Kind) -> dict[str, object]:
    if kind == "preference":
        cut = tokens.index(None)
        sides = {"chosen": tokens[:cut], "rejected": tokens[cut + 1 :]}
        return {
            f"{side}_{what}": its for side, its in sides.items() for what in ("input_ids", "labels")
        }
    if kind == "kto":
        return {"input_ids": tokens[1:], "labels": tokens[1:], "desirable": bool(tokens[0])}
    return {"input_ids": tokens, "labels": tokens}


def _batch(columns: dict[str, list], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        pa.array(columns[field.name], field.type) for field in schema if field.name != "source"
    ]
    names = [field.name for field in schema if field.name != "source"]
    sources = pa.array(columns["source"], pa.string()).dictionary_encode()
    made = dict(zip(names, arrays, strict=True)) | {"source": sources}
    return pa.RecordBatch.from_arrays([made[name] for name in schema.names], schema=schema)
