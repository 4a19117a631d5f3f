"""plan.json: which slices make up each split, in which order, and what became of every record.

It is written when all data lies in place, and the stage's facts are a function of it alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import StageError
from penstock.prepare.faults import Tally, listed
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.slices import Slice
from penstock.prepare.split import Finished, target_of
from penstock.rows.reader import flat, map_batches
from penstock.rows.schema import IGNORED, SPLITS, histogram

FORMAT = 1


def plan_of(finished: Sequence[Finished], settings: PrepareSettings, out: Path) -> dict[str, Any]:
    """The plan of the data that lies below `out/data`."""
    return {
        "format": FORMAT,
        "order": {
            "seed": settings.seed,
            "shuffle_before_merging_datasets": settings.shuffle_before_merging_datasets,
            "shuffle_merged_datasets": settings.shuffle_merged_datasets,
        },
        "splits": {split: _entries(split, finished, out) for split in SPLITS},
        "slices": [
            {
                "key": item.key,
                "role": item.role,
                "dataset": item.dataset,
                "label": item.label,
                "pieces": [piece.as_json() for piece in item.pieces],
                "tally": tally.as_json(),
            }
            for item, _, tally in finished
        ],
    }


def facts_of(plan: dict[str, Any]) -> dict[str, Any]:
    """What people look for in prepared data; lengths are in powers of two, inclusive."""
    splits: dict[str, list[dict[str, Any]]] = plan["splits"]
    tally = Tally.total(Tally.of_json(item["tally"]) for item in plan["slices"])
    return {
        **{
            name: {split: sum(entry[name] for entry in splits[split]) for split in SPLITS}
            for name in ("rows", "tokens", "trained_tokens")
        },
        "lengths": {split: _merged([e["lengths"] for e in splits[split]]) for split in SPLITS},
        "records": tally.records,
        "truncated": tally.truncated,
        "dropped": dict(sorted(tally.left_out.items())),
        "dropped_samples": tally.samples,
        "sources": _sources(plan["slices"]),
    }


def check_sources(finished: Sequence[Finished], settings: PrepareSettings) -> None:
    """Raise StageError for a source with too many unusable records, or with nothing usable."""
    by_source: dict[tuple[str, int], list[Finished]] = {}
    for entry in finished:
        by_source.setdefault((entry[0].role, entry[0].dataset), []).append(entry)
    for entries in by_source.values():
        _check(entries[0][0], Tally.total(tally for _, _, tally in entries), settings)


def _check(item: Slice, tally: Tally, settings: PrepareSettings) -> None:
    allowed = settings.bad_rows_allowed
    place = f"{item.label} (data.{'' if item.role == 'train' else 'test_'}datasets.{item.dataset})"
    if tally.bad > allowed * tally.records:
        share = tally.bad / tally.records
        raise StageError(
            f"{place}: {tally.bad} of {tally.records} records ({share:.2%}) cannot be used; "
            f"{allowed:.2%} may be.\n{listed(tally.samples)}\n"
            "  Correct them, or set data.bad_rows_allowed to the share that may be left out."
        )
    if not tally.rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in tally.left_out.items())
        raise StageError(
            f"{place}: none of its {tally.records} records gives a sample ({reasons}).\n"
            f"{listed(tally.samples)}\n  Check type, max_seq_len and the field_ settings."
        )


def _entries(split: str, finished: Sequence[Finished], out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item, _, _ in finished:
        path = target_of(out, split, item)
        if path.is_file():
            name = path.relative_to(out).as_posix()
            found.append({"file": name, "dataset": item.dataset, **_measured(path)})
    return found


def _measured(path: Path) -> dict[str, Any]:
    """Counts of one file. The first token of a sample is the target of none, so never trained."""
    lengths: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    trained = 0
    for batch in map_batches(path):
        labels, offsets = flat(batch.column("labels"))
        is_trained = labels != IGNORED
        is_trained[offsets[:-1]] = False
        trained += int(is_trained.sum())
        lengths.append(np.diff(offsets))
    sizes = np.concatenate(lengths)
    return {
        "rows": len(sizes),
        "tokens": int(sizes.sum()),
        "trained_tokens": trained,
        "lengths": histogram(sizes),
    }


def _merged(histograms: list[dict[str, int]]) -> dict[str, int]:
    buckets = sorted({int(upper) for counts in histograms for upper in counts})
    return {str(b): sum(counts.get(str(b), 0) for counts in histograms) for b in buckets}


def _sources(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for item in slices:
        tally = Tally.of_json(item["tally"])
        entry = found.setdefault(
            (item["role"], item["dataset"]),
            {
                "role": item["role"],
                "label": item["label"],
                "slices": 0,
                "records": 0,
                "rows": 0,
                "bad": 0,
            },
        )
        entry["slices"] += 1
        entry["records"] += tally.records
        entry["rows"] += tally.rows
        entry["bad"] += tally.bad
    return list(found.values())
