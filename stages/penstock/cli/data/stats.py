"""`penstock data stats`: statistics of the prepared data, with histograms."""

from collections.abc import Mapping, Sequence
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
    found = compute_statistics(prepared.step.path)
    locate = build_locator(prepared.step.stage)
    found["dropped_samples"] = [_add_location(each, locate) for each in found["dropped_samples"]]
    found["packing"] = _compare_packing(prepared)
    found["packed"] = _packed_sources(prepared)
    blocks = [
        f"{found['kind']} data in {prepared.step.where}",
        table([_HEADING, *_rows(found["splits"])]),
        "\n".join(
            _format_labels(split, its) for split, its in found["splits"].items() if _has_labels(its)
        ),
        *(
            _format_histogram(split, its)
            for split, its in found["splits"].items()
            if its["samples"]
        ),
        _format_mix(found["mix"]),
        _format_dropped(found),
        _format_packing(found["packing"]),
        packed_sources_table(found["packed"]),
    ]
    console.result("\n\n".join(block for block in blocks if block))
    return found


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
    for split, its in splits.items():
        rows += [_row(split, source["label"], source) for source in its["sources"]]
        if len(its["sources"]) > 1:
            rows.append(_row(split, "all", its))
    return rows


def _row(split: str, name: str, its: Mapping[str, Any]) -> tuple[str, ...]:
    lengths = its["lengths"]
    counts = (f"{its['samples']:,}", f"{its['tokens']:,}", f"{its['trained_share']:.1%}")
    return (split, name, *counts, *(f"{lengths[n]:,}" for n in LENGTHS), f"{lengths['mean']:,.0f}")


def _has_labels(its: Mapping[str, Any]) -> bool:
    return "desirable" in its and its["samples"] > 0


def _format_labels(split: str, its: Mapping[str, Any]) -> str:
    share = its["desirable"] / its["samples"]
    return f"{its['desirable']:,} of {its['samples']:,} {split} answers are desirable ({share:.1%})"


def _format_histogram(split: str, its: Mapping[str, Any]) -> str:
    bars = its["histogram"]
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
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + EIGHTHS[rest].strip()).ljust(BAR)


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


def _format_dropped(found: Mapping[str, Any]) -> str:
    """The number of dropped records by reason, and what was truncated."""
    dropped: Mapping[str, int] = found["dropped"]
    lines = [f"{found['records']:,} records read, {sum(dropped.values()):,} dropped"]
    if found["truncated"]:
        cut = f"{found['tokens_cut']:,} tokens"
        turns = f", {found['turns_dropped']:,} whole turns" if found["turns_dropped"] else ""
        lines[0] += f", {found['truncated']:,} truncated ({cut}{turns})"
    for reason, count in sorted(dropped.items(), key=lambda each: -each[1]):
        lines.append(f"  {reason}: {count:,}")
        lines += [
            f"    {_format_dropped_sample(each)}"
            for each in _with_reason(found["dropped_samples"], reason)
        ]
    return "\n".join(lines)


def _with_reason(examples: Sequence[Mapping[str, Any]], reason: str) -> list[Mapping[str, Any]]:
    return [example for example in examples if example["reason"] == reason]


def _add_location(example: Mapping[str, Any], locate: Locate) -> dict[str, Any]:
    """The example with file and line, if they are known."""
    place = locate(example["slice"], example["row"]) if "slice" in example else None
    return {**example, **(asdict(place) if place else {})}


def _format_dropped_sample(each: Mapping[str, Any]) -> str:
    if "file" in each:
        return f"{record_location(each)}: {each['why']}"
    return f"{each['source']}, record {each['row']} of slice {each['slice']}: {each['why']}"


def _format_packing(packing: Mapping[str, Any]) -> str:
    if packing["refused"]:
        return f"cannot be packed: {packing['refused']}"
    if not packing["methods"]:
        return ""
    return f"rows of {packing['row_tokens']:,} tokens\n{packing_table(packing['methods'])}"
