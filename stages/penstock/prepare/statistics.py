"""Statistics of prepared data: counts from plan.json, lengths from the files' offsets."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.files import read_json
from penstock.prepare.plan import SECTIONS, summarize_plan
from penstock.prepare.sample_sources import split_sources
from penstock.rows.prepared import PLAN, PreparedSamples
from penstock.rows.sample_order import Indices
from penstock.rows.schema import SPLITS

PERCENTS = (5, 50, 95)
MAX_BARS = 16
"""Maximum bars of a histogram, plus one for longer samples."""

COPIED_FACTS = ("records", "truncated", "tokens_cut", "turns_dropped", "dropped", "dropped_samples")


def compute_statistics(folder: Path) -> dict[str, Any]:
    """Statistics of the prepared artifact in `folder`, as plain JSON.

    A pair has the length of its longer side and the tokens of both. Percentiles use the nearest
    rank: the smallest length that at least p percent of the samples do not exceed.
    """
    plan = read_json(folder / PLAN)
    facts = summarize_plan(plan)
    return {
        "kind": plan["kind"],
        "splits": {split: _split_statistics(folder, plan, split) for split in SPLITS},
        "mix": {
            "strategy": facts["mix_strategy"],
            "samples_per_epoch": facts["samples_per_epoch"],
            "epochs": facts["epochs"],
            "sources": [
                _mix_entry(source) for source in facts["sources"] if source["role"] == "train"
            ],
        },
        **{name: facts[name] for name in COPIED_FACTS},
    }


def describe_lengths(lengths: Indices) -> dict[str, float]:
    """Percentiles, maximum and mean of lengths; empty without lengths."""
    if not len(lengths):
        return {}
    ranks = [math.ceil(percent * len(lengths) / 100) - 1 for percent in PERCENTS]
    ordered = np.partition(lengths, ranks)
    percentiles = {f"p{p}": int(ordered[rank]) for p, rank in zip(PERCENTS, ranks, strict=True)}
    return {**percentiles, "max": int(lengths.max()), "mean": round(float(lengths.mean()), 1)}


def length_histogram(lengths: Indices) -> list[dict[str, int]]:
    """Histogram with bars of a round width: `above`, `to` (inclusive), `samples`.

    The last bar contains all longer samples.
    """
    if not len(lengths):
        return []
    longest, usual = int(lengths.max()), describe_lengths(lengths)["p95"] * 1.25
    span = min(longest, usual) - int(lengths.min())
    # The smallest of 1, 2, 5, 10, 20, 50, … with which there are no more bars.
    least = span / MAX_BARS
    power = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    first = (int(lengths.min()) - 1) // width
    count = max(1, math.ceil(min(longest, usual) / width) - first)
    bin_index = np.minimum((lengths - 1) // width - first, count)
    samples = np.bincount(bin_index, minlength=count).tolist()
    bins = [
        {"above": index * width, "to": min((index + 1) * width, longest), "samples": number}
        for index, number in enumerate(samples, start=first)
    ]
    bins[-1]["to"] = longest
    return bins


def _split_statistics(folder: Path, plan: dict[str, Any], split: str) -> dict[str, Any]:
    samples = PreparedSamples(folder, split)
    lengths = samples.lengths()
    origins = split_sources(plan, split)
    tokens, trained = (
        sum(count[name] for count in origins.counts) for name in ("tokens", "trained_tokens")
    )
    is_kto = plan["kind"] == "kto"
    return {
        "samples": len(lengths),
        "tokens": tokens,
        "trained_tokens": trained,
        "trained_share": _share(trained, tokens),
        "lengths": describe_lengths(lengths),
        "histogram": length_histogram(lengths),
        **({"desirable": int(samples.desirable().sum())} if is_kto else {}),
        "sources": [
            {
                "label": origin.label,
                "section": origin.section,
                "samples": count["rows"],
                "tokens": count["tokens"],
                "trained_tokens": count["trained_tokens"],
                "trained_share": _share(count["trained_tokens"], count["tokens"]),
                "lengths": describe_lengths(lengths[origins.source_indices == index]),
            }
            for index, (origin, count) in enumerate(
                zip(origins.sources, origins.counts, strict=True)
            )
        ],
    }


def _mix_entry(source: dict[str, Any]) -> dict[str, Any]:
    """Samples of a source in an epoch; `repeats` is the mean count of each of its samples."""
    repeats = source["drawn"] / source["samples"] if source["samples"] else 0.0
    return {
        "label": source["label"],
        "section": f"data.{SECTIONS['train']}.{source['dataset']}",
        "samples": source["samples"],
        "drawn": source["drawn"],
        "share": source["share"],
        "repeats": round(repeats, 4),
        "held_out": source["held_out"],
    }


def _share(part: int, total: int) -> float:
    return round(part / total, 6) if total else 0.0
