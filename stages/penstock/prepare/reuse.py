"""Slices that an earlier prepared artifact holds already, put together again.

Another seed, shuffle or validation size gives another artifact, but the same slices: their samples
lie divided over that artifact's splits, each with its place in the slice. Only files that still are
what their manifest says are taken.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.digests import digests_of
from penstock.core.errors import ArtifactError
from penstock.core.files import read_json, write_json
from penstock.core.stage import MANIFEST
from penstock.prepare.faults import Tally
from penstock.prepare.read import BATCH
from penstock.prepare.slices import Slice
from penstock.prepare.split import write_batches
from penstock.prepare.tokenise import tally_of
from penstock.rows.prepared import PLAN
from penstock.rows.reader import map_batches
from penstock.rows.schema import PREPARED, SPLITS


def restore(slices: Sequence[tuple[Slice, Path]], siblings: Path) -> None:
    """Write those slices to their targets that sealed artifacts in `siblings` hold in full.

    The files are what tokenising would write, byte for byte. What cannot be read is passed over.
    """
    known = _known(siblings) if slices else {}
    for item, target in slices:
        if item.key not in known:
            continue
        folder, tally = known[item.key]
        try:
            batches = _gathered(_vouched_for(folder, item.file), tally)
        except (ArtifactError, pa.ArrowException, OSError, ValueError, KeyError):
            continue
        if sum(batch.num_rows for batch in batches) == tally.rows:
            write_json(tally_of(target), tally.as_json())
            write_batches(target, batches)


def _known(siblings: Path) -> dict[str, tuple[Path, Tally]]:
    found: dict[str, tuple[Path, Tally]] = {}
    for manifest in sorted(siblings.glob(f"*/{MANIFEST}")):
        if "." in manifest.parent.name:
            continue  # set aside, in order to be built again
        try:
            plan: dict[str, Any] = read_json(manifest.with_name(PLAN))
            for item in plan["slices"]:
                found[item["key"]] = (manifest.parent, Tally.of_json(item["tally"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _vouched_for(folder: Path, file: str) -> list[Path]:
    """The slice's part of each split. Raises ArtifactError if one is not what the manifest says."""
    listed = {entry["path"]: entry["sha256"] for entry in read_json(folder / MANIFEST)["files"]}
    names = [name for split in SPLITS if (name := f"data/{split}/{file}") in listed]
    paths = [folder / name for name in names]
    if digests_of(paths) != [listed[name] for name in names]:
        raise ArtifactError(f"{file} in {folder} is not what its manifest says.")
    return paths


def _gathered(paths: Sequence[Path], tally: Tally) -> list[pa.RecordBatch]:
    """One batch for every `BATCH` records, as tokenising makes them."""
    batches = [batch for path in paths for batch in map_batches(path)]
    table = pa.Table.from_batches(batches, schema=PREPARED).sort_by("row")
    places = table["row"].to_numpy()
    starts = range(0, tally.records, BATCH)
    bounds = np.searchsorted(places, [*starts, max(tally.records, 1)]).tolist()
    table = table.combine_chunks()
    found: list[pa.RecordBatch] = []
    for low, high in pairwise(bounds):
        part = table.slice(low, high - low).combine_chunks().to_batches()
        found += part or [pa.RecordBatch.from_pylist([], schema=PREPARED)]
    return found
