"""Data section of a model card: sample counts per source, and dropped samples."""

from collections.abc import Mapping
from typing import Any

from penstock.export.card_text import code, count, section, table
from penstock.export.license import fetch_dataset_license
from penstock.export.lineage import Lineage

HEADING = ("source", "used for", "samples", "tokens", "trained on", "license")


def data_section(lineage: Lineage) -> str:
    """The section; empty if nothing is known."""
    sources = table(HEADING, [_source(source) for source in lineage.sources])
    return section("Data", sources, _totals(lineage), _dropped(lineage.prepared))


def _source(source: Mapping[str, Any]) -> tuple[str, ...]:
    pin, license_ = source["pin"], None
    name = code(source["label"])
    if pin.get("kind") == "hub":
        url = f"https://huggingface.co/datasets/{pin['repo']}"
        name = f"[{pin['repo']}]({url}) at {code(pin['commit'][:12])}"
        name += "".join(f", {code(pin[part])}" for part in ("name", "split") if pin.get(part))
        license_ = fetch_dataset_license(pin["repo"], pin["commit"])
    counts = (f"{source[count]:,}" for count in ("samples", "tokens", "trained_tokens"))
    license_name = code(license_.display_name) if license_ else "unknown"
    return name, source["use"], *counts, license_name


def _totals(lineage: Lineage) -> str:
    prepared, packed = lineage.prepared, lineage.packed
    lines: list[str] = []
    if num_validation := sum(source.get("held_out", 0) for source in lineage.sources):
        lines.append(
            f"{count(num_validation, 'sample')} of the training sources held out for validation."
        )
    if prepared.get("mix_strategy", "concat") != "concat":
        drawn = count(prepared["samples_per_epoch"], "sample")
        lines.append(f"{drawn} drawn for an epoch ({code(prepared['mix_strategy'])}).")
    if packed:
        rows, fill = packed["rows"]["train"], packed["fill"]["train"]
        lines.append(f"Packed into {count(rows, 'row')}, {fill:.1%} full.")
    return " ".join(lines)


def _dropped(prepared: Mapping[str, Any]) -> str:
    dropped: Mapping[str, int] = prepared.get("dropped", {})
    lines: list[str] = []
    if dropped:
        reasons = ", ".join(
            f"{number:,} {code(reason.replace('_', ' '))}"
            for reason, number in sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
        )
        records = count(prepared["records"], "record")
        lines.append(f"{sum(dropped.values()):,} of {records} dropped: {reasons}.")
    if prepared.get("truncated"):
        cut = count(prepared["tokens_cut"], "token")
        lines.append(f"{count(prepared['truncated'], 'sample')} truncated, by {cut} in total.")
    if prepared.get("turns_dropped"):
        lines.append(f"{count(prepared['turns_dropped'], 'turn')} of conversations dropped.")
    return " ".join(lines)
