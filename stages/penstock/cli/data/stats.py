"""`penstock data stats`: statistics of the prepared data, with histograms."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.cli.console import Console, table
from penstock.cli.data.load_prepared import Prepared
from penstock.cli.pack_dry_run import packing_table
from penstock.cli.packed_sources import packed_sources_table
from penstock.core.cache.store import find_local
from penstock.core.errors import PenstockError
from penstock.pack.compare import compare
from penstock.pack.stage import Pack
from penstock.pipeline.plan import pack_step
from penstock.prepare.bad_records import record_location
from penstock.prepare.locate_record import Locate, build_locator
from penstock.prepare.statistics import compute_statistics

BAR = 48
"""Characters of the longest bar."""

EIGHTHS = " ▏▎▍▌▋▊▉"
LENGTHS = ("p5", "p50", "p95", "max")


def show_statistics(prepared: Prepared, console: Console) -> dict[str, Any]:
    """Print the statistics; returns them as plain values."""
    statistics = compute_statistics(prepared.step.path)
    locate = build_locator(prepared.step.stage)
    statistics["dropped_samples"] = [
        _add_location(sample, locate) for sample in statistics["dropped_samples"]
    ]
    statistics["packing"] = _compare_packing(prepared)
    statistics["packed"] = _packed_sources(prepared)
    blocks = [
        f"{statistics['kind']} data in {prepared.step.where}",
        table([_HEADING, *_rows(statistics["splits"])]),
        "\n".join(
            _format_labels(split, figures)
            for split, figures in statistics["splits"].items()
            if figures["samples"] and "desirable" in figures
        ),
        *(
            _format_histogram(split, figures)
            for split, figures in statistics["splits"].items()
            if figures["samples"]
        ),
        _format_mix(statistics["mix"]),
        _format_dropped(statistics),
        _format_packing(statistics["packing"]),
        packed_sources_table(statistics["packed"]),
    ]
    console.result("\n\n".join(block for block in blocks if block))
    return statistics


def _compare_packing(prepared: Prepared) -> dict[str, Any]:
    """Every packing method with the run's settings, or why none applies."""
    data = prepared.run.data
    stage = pack_step(prepared.run, prepared.step.artifact).stage
    assert isinstance(stage, Pack)
    settings = stage.resolved()
    methods, refused = [], None
    try:
        methods = compare(prepared.step.path, settings, data.pad_to_multiple_of)
    except PenstockError as error:
        refused = str(error)
    return {
        "row_tokens": settings.sample_packing_sequence_len,
        "methods": [asdict(method) for method in methods],
        "refused": refused,
    }


def _packed_sources(prepared: Prepared) -> dict[str, Any]:
    """The counts of sources in the packed rows; empty before they are packed."""
    manifest = find_local(pack_step(prepared.run, prepared.step.artifact))
    sources = manifest["facts"].get("sources") if manifest else None
    return {"sources": sources} if sources else {}


_HEADING = ("split", "source", "samples", "tokens", "trained", *LENGTHS, "mean")


def _rows(splits: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for split, figures in splits.items():
        rows += [_row(split, source["label"], source) for source in figures["sources"]]
        if len(figures["sources"]) > 1:
            rows.append(_row(split, "all", figures))
    return rows


def _row(split: str, name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    lengths = figures["lengths"]
    counts = (
        f"{figures['samples']:,}",
        f"{figures['tokens']:,}",
        f"{figures['trained_share']:.1%}",
    )
    return (split, name, *counts, *(f"{lengths[n]:,}" for n in LENGTHS), f"{lengths['mean']:,.0f}")


def _format_labels(split: str, figures: Mapping[str, Any]) -> str:
    share = figures["desirable"] / figures["samples"]
    counts = f"{figures['desirable']:,} of {figures['samples']:,}"
    return f"{counts} {split} answers are desirable ({share:.1%})"


def _format_histogram(split: str, figures: Mapping[str, Any]) -> str:
    bars = figures["histogram"]
    most = max(bar["samples"] for bar in bars)
    rows = [
        (
            _range(bar["above"] + 1, bar["to"]),
            _bar(bar["samples"] / most),
            f"{bar['samples']:,}",
        )
        for bar in bars
    ]
    return f"tokens of {split} samples\n{table(rows)}"


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} - {last:,}"


def _bar(share: float) -> str:
    """A bar of this share of the longest bar; any share above 0 is visible."""
    eighths = max(round(share * BAR * 8), int(share > 0))
    full_blocks, remainder = divmod(eighths, 8)
    return ("█" * full_blocks + EIGHTHS[remainder].strip()).ljust(BAR)


def _format_mix(mix: Mapping[str, Any]) -> str:
    sources = mix["sources"]
    if mix["strategy"] == "concat" and len(sources) < 2:
        return ""
    rows = [("source", "samples", "an epoch", "share", "repeats", "held out")]
    rows += [
        (
            source["label"],
            f"{source['samples']:,}",
            f"{source['drawn']:,}",
            f"{source['share']:.1%}",
            f"{source['repeats']:.2f}x",
            f"{source['held_out']:,}",
        )
        for source in sources
    ]
    epoch = f"{mix['samples_per_epoch']:,} samples an epoch"
    planned = f", {mix['epochs']} epochs planned" if mix["strategy"] == "random" else ""
    return f"mix_strategy: {mix['strategy']}, {epoch}{planned}\n{table(rows)}"


def _format_dropped(statistics: Mapping[str, Any]) -> str:
    """The number of dropped records by reason, and what was truncated."""
    dropped: Mapping[str, int] = statistics["dropped"]
    lines = [f"{statistics['records']:,} records read, {sum(dropped.values()):,} dropped"]
    if statistics["truncated"]:
        cut = f"{statistics['tokens_cut']:,} tokens"
        turns = (
            f", {statistics['turns_dropped']:,} whole turns" if statistics["turns_dropped"] else ""
        )
        lines[0] += f", {statistics['truncated']:,} truncated ({cut}{turns})"
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        lines.append(f"  {reason}: {count:,}")
        lines += [
            f"    {_format_dropped_sample(sample)}"
            for sample in statistics["dropped_samples"]
            if sample["reason"] == reason
        ]
    return "\n".join(lines)


def _add_location(example: Mapping[str, Any], locate: Locate) -> dict[str, Any]:
    """The example with file and line, if they are known."""
    location = locate(example["slice"], example["row"]) if "slice" in example else None
    return {**example, **(asdict(location) if location else {})}


def _format_dropped_sample(sample: Mapping[str, Any]) -> str:
    if "file" in sample:
        return f"{record_location(sample)}: {sample['why']}"
    return f"{sample['source']}, record {sample['row']} of slice {sample['slice']}: {sample['why']}"


def _format_packing(packing: Mapping[str, Any]) -> str:
    if packing["refused"]:
        return f"cannot be packed: {packing['refused']}"
    if not packing["methods"]:
        return ""
    return f"rows of {packing['row_tokens']:,} tokens\n{packing_table(packing['methods'])}"
