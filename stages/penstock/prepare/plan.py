"""plan.json: the content of every file of each split, the mix, and the counts of dropped records.

It is written after all data files. It depends only on content and settings, and the stage's facts
depend only on it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError, StageError
from penstock.prepare.bad_records import Tally, format_causes
from penstock.prepare.infer_type import infer_from_splits
from penstock.prepare.mix import build_mixer, mix_settings
from penstock.prepare.notices import SECTIONS
from penstock.prepare.select.features import LONGEST, TOKENS, TRAINED, Array, Features
from penstock.prepare.select.select import Selection
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.slices import Slice, TokenizedSlice
from penstock.prepare.split import DataFile, SlicePart, file_path, plan_files
from penstock.rows.sample_order import DatasetMixer, samples_per_dataset
from penstock.rows.schema import SPLITS, histogram

FORMAT = 2


def build_plan(
    finished: Sequence[TokenizedSlice], selection: Selection, settings: PrepareSettings
) -> dict[str, Any]:
    """Build plan.json for the files that `publish_splits` writes."""
    files = plan_files(finished, selection, settings)
    shares = [part for of_split in files.values() for file in of_split for part in file.shares]
    entries = {part.entry[0].key: part.entry for part in shares if not part.is_whole}
    counts = dict(zip(entries, Features().counts(list(entries.values())), strict=True))
    splits = {
        split: [
            _file_entry(file_path(split, file), file, counts, settings) for file in files[split]
        ]
        for split in SPLITS
    }
    rows, tokens = Counter[int](), Counter[int]()
    for part in (part for entry in splits["train"] for part in entry["parts"]):
        rows[part["dataset"]] += part["rows"]
        tokens[part["dataset"]] += part["tokens"]
    datasets = range(len(settings.datasets))
    mean_tokens = [tokens[of] / rows[of] if rows[of] else 1.0 for of in datasets]
    mixing = build_mixer(settings, mean_tokens)
    return {
        "format": FORMAT,
        "kind": settings.kind,
        "mix": asdict(mixing),
        "splits": splits,
        "slices": [
            {
                "key": item.key,
                "role": item.role,
                "dataset": item.dataset,
                "label": item.label,
                "pieces": [piece.as_json() for piece in item.pieces],
                "tally": tally.as_json(),
                "dropped": dict(sorted(dropped.items())),
            }
            for (item, _, tally), dropped in zip(finished, selection.dropped, strict=True)
        ],
        "sources": _summarize_sources(finished, splits, mixing, settings),
        "examples": list(selection.examples),
        "validation_in_train": selection.validation_in_train,
    }


def summarize_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """The facts of the prepare stage. Length histograms have power-of-two buckets, inclusive."""
    splits: dict[str, list[dict[str, Any]]] = plan["splits"]
    # Decontamination data is tokenized too, but is not part of the prepared data.
    slices = [item for item in plan["slices"] if item["role"] != "avoid"]
    tally = Tally.total(Tally.from_json(item["tally"]) for item in slices)
    dropped = sum((Counter(item["dropped"]) for item in slices), tally.left_out)
    return {
        "kind": plan["kind"],
        **{
            name: {split: sum(entry[name] for entry in splits[split]) for split in SPLITS}
            for name in ("rows", "tokens", "trained_tokens")
        },
        "lengths": {
            split: _merge_histograms(e["lengths"] for e in splits[split]) for split in SPLITS
        },
        "records": tally.records,
        "truncated": tally.truncated,
        "tokens_cut": tally.tokens_cut,
        "turns_dropped": tally.turns_dropped,
        "dropped": dict(sorted(dropped.items())),
        "blank_answers": tally.blank_answers,
        "assistant_first": tally.assistant_first,
        "validation_in_train": plan.get("validation_in_train", 0),
        "without_end": tally.without_end,
        "repeated_bos": tally.repeated_bos,
        "dropped_samples": [*tally.samples, *plan["examples"]],
        **({"images": tally.images} if tally.media else {}),
        "sources": plan["sources"],
        "mix_strategy": plan["mix"]["strategy"],
        "samples_per_epoch": sum(s["drawn"] for s in plan["sources"] if s["role"] == "train"),
        "epochs": plan["mix"]["epochs"],
    }


def check_sources(finished: Sequence[TokenizedSlice], settings: PrepareSettings) -> None:
    """Raise StageError for a source with too many unusable records, or with no sample."""
    by_source: dict[tuple[str, int], list[TokenizedSlice]] = {}
    for entry in finished:
        by_source.setdefault((entry[0].role, entry[0].dataset), []).append(entry)
    for entries in by_source.values():
        _check_source(entries[0][0], Tally.total(tally for _, _, tally in entries), settings)


def _check_source(item: Slice, tally: Tally, settings: PrepareSettings) -> None:
    allowed = settings.bad_rows_allowed
    location = f"{item.label} (data.{SECTIONS[item.role]}.{item.dataset})"
    if not tally.records:
        raise StageError(
            f"{location} has no records.\n  Leave it out, fill it, or use another piece (shards, "
            "dataset_shard_num)."
        )
    if tally.lacking:
        # Not left to bad_rows_allowed: the result would not have them once they are installed.
        raise StageError(
            f"{location} has records that need packages which are not installed.\n"
            f"{format_causes(tally.samples, tally.causes)}\n"
            f"  pip install 'penstock[{','.join(tally.lacking)}]'."
        )
    if tally.bad > allowed * tally.records:
        part = tally.bad / tally.records
        raise StageError(
            f"{location}: {tally.bad} of {tally.records} records ({part:.2%}) cannot be used; "
            f"{allowed:.2%} may be.\n{format_causes(tally.samples, tally.causes)}\n"
            f"{_type_hint(item)}"
            "  Correct them, or set data.bad_rows_allowed to the part that may be left out."
        )
    if not tally.rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in tally.left_out.items())
        raise StageError(
            f"{location}: none of its {tally.records} records gives a sample ({reasons}).\n"
            f"{format_causes(tally.samples, tally.causes)}\n{_type_hint(item)}"
            "  Check type, max_seq_len and the field_ settings."
        )


def _type_hint(item: Slice) -> str:
    """Hint with the inferred type, if it differs from the configured one; else empty."""
    try:
        looks = infer_from_splits(item.pieces)
    except PenstockError:
        return ""
    if looks is None or looks.type == item.settings.type:
        return ""
    return f"  They look like {looks}, but are read as {item.settings.type}.\n"


def _file_entry(
    path: str, file: DataFile, counts: Mapping[str, Array], settings: PrepareSettings
) -> dict[str, Any]:
    counted = [_count_part(part, counts) for part in file.shares]
    names = ("rows", "tokens", "trained_tokens")
    parts: list[dict[str, Any]] = []
    for part, count in zip(file.shares, counted, strict=True):
        item = part.entry[0]
        mix = settings.mix if item.role == "train" else settings.test_mix
        weight = mix_settings(mix, item.dataset).loss_weight
        entry = {
            "slice": item.key,
            "dataset": item.dataset,
            **{name: count[name] for name in names},
        }
        parts.append(entry | ({} if weight == 1 else {"loss_weight": weight}))
    return {
        "file": path,
        "content": file.content,
        **{name: sum(count[name] for count in counted) for name in names},
        "lengths": _merge_histograms(count["lengths"] for count in counted),
        "parts": parts,
    }


def _count_part(part: SlicePart, counts: Mapping[str, Array]) -> dict[str, Any]:
    item, _, tally = part.entry
    if part.is_whole:
        return {
            "rows": tally.rows,
            "tokens": tally.tokens,
            "trained_tokens": tally.trained_tokens,
            "lengths": dict(tally.lengths),
        }
    part_counts = counts[item.key][:, part.start : part.stop]
    part_counts = part_counts if part.keep is None else part_counts[:, part.keep]
    return {
        "rows": part_counts.shape[1],
        "tokens": int(part_counts[TOKENS].sum(dtype=np.int64)),
        "trained_tokens": int(part_counts[TRAINED].sum(dtype=np.int64)),
        "lengths": histogram(part_counts[LONGEST]),
    }


def _merge_histograms(histograms: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in histograms:
        total.update(counts)
    return dict(sorted(total.items(), key=lambda item: int(item[0])))


def _summarize_sources(
    finished: Sequence[TokenizedSlice],
    splits: dict[str, list[dict[str, Any]]],
    mixing: DatasetMixer,
    settings: PrepareSettings,
) -> list[dict[str, Any]]:
    """Counts of every source: `samples` and tokens in its own split; for training sources also
    `held_out` validation samples, and `drawn` samples per epoch (a `share` of it)."""
    summaries: dict[tuple[str, int], dict[str, Any]] = {}
    for item, _, tally in finished:
        entry = summaries.get((item.role, item.dataset))
        if entry is None:
            counted = ("slices", "records", "rows", "bad", "samples", "tokens", "trained_tokens")
            entry = {"role": item.role, "dataset": item.dataset, "label": item.label}
            entry |= {**dict.fromkeys(counted, 0), "type": item.settings.type}
            entry |= {"unread": {}, "unread_examples": {}}
            if item.role == "train":
                entry |= {"held_out": 0, "drawn": 0, "share": 0.0}
            summaries[item.role, item.dataset] = entry
        entry["slices"] += 1
        entry["records"] += tally.records
        entry["rows"] += tally.rows
        entry["bad"] += tally.bad
        for name, count in tally.unread.items():
            # Slices do not know `split_by`, which reads this column.
            if name == settings.split_by:
                continue
            entry["unread"][name] = entry["unread"].get(name, 0) + count
            if name in tally.unread_examples:
                entry["unread_examples"].setdefault(name, tally.unread_examples[name])
    role_of = {item.key: item.role for item, _, _ in finished}
    for split in SPLITS:
        for part in (part for entry in splits[split] for part in entry["parts"]):
            source = summaries[role_of[part["slice"]], part["dataset"]]
            if split == "validation" and role_of[part["slice"]] == "train":
                source["held_out"] += part["rows"]
                continue
            source["samples"] += part["rows"]
            source["tokens"] += part["tokens"]
            source["trained_tokens"] += part["trained_tokens"]
    train = [summaries.get(("train", of)) for of in range(len(settings.datasets))]
    counts = samples_per_dataset([entry["samples"] if entry else 0 for entry in train], mixing)
    for entry, count in zip(train, counts, strict=True):
        if entry:
            entry |= {"drawn": count, "share": round(count / sum(counts), 6)}
    return list(summaries.values())
