"""Data section of a model card: sample counts per source, and dropped samples."""

from collections.abc import Mapping
from typing import Any

from penstock.export.card_text import code, count, section, table
from penstock.export.licence import Licence, licence_of_dataset
from penstock.export.lineage import Lineage

HEADING = ("source", "used for", "samples", "tokens", "trained on", "licence")


def data_section(lineage: Lineage) -> str:
    """The section; empty if nothing is known."""
    prepared = lineage.prepared
    return section(
        "Data",
        table(HEADING, [_source(each) for each in lineage.sources]),
        _totals(lineage),
        _left_out(prepared),
    )


def _source(its: Mapping[str, Any]) -> tuple[str, ...]:
    pin, licence = its["pin"], None
    name = code(its["label"])
    if pin.get("kind") == "hub":
        url = f"https://huggingface.co/datasets/{pin['repo']}"
        name = f"[{pin['repo']}]({url}) at {code(pin['commit'][:12])}"
        name += "".join(f", {code(pin[part])}" for part in ("name", "split") if pin.get(part))
        licence = licence_of_dataset(pin["repo"], pin["commit"])
    tokens, trained = its["tokens"], its["trained_tokens"]
    return (
        name,
        its["use"],
        f"{its['samples']:,}",
        f"{tokens:,}",
        f"{trained:,}",
        _told(licence),
    )


def _told(licence: Licence | None) -> str:
    return code(licence.spoken) if licence else "not known here"


def _totals(lineage: Lineage) -> str:
    prepared, packed = lineage.prepared, lineage.packed
    lines: list[str] = []
    if held := sum(each.get("held_out", 0) for each in lineage.sources):
        lines.append(f"{count(held, 'sample')} of the training sources held out.")
    if prepared.get("mix_strategy", "concat") != "concat":
        drawn = count(prepared["samples_per_epoch"], "sample")
        lines.append(f"{drawn} drawn for an epoch ({code(prepared['mix_strategy'])}).")
    if packed:
        rows, fill = packed["rows"]["train"], packed["fill"]["train"]
        lines.append(f"Packed into {count(rows, 'row')}, which are {fill:.1%} full.")
    return " ".join(lines)


def _left_out(prepared: Mapping[str, Any]) -> str:
    dropped: Mapping[str, int] = prepared.get("dropped", {})
    lines: list[str] = []
    if dropped:
        reasons = ", ".join(
            f"{number:,} {code(reason.replace('_', ' '))}"
            for reason, number in sorted(dropped.items(), key=lambda each: (-each[1], each[0]))
        )
        records = count(prepared["records"], "record")
        lines.append(f"{sum(dropped.values()):,} of {records} left out: {reasons}.")
    if prepared.get("truncated"):
        cut = count(prepared["tokens_cut"], "token")
        lines.append(f"{count(prepared['truncated'], 'sample')} cut, by {cut} in all.")
    if prepared.get("turns_dropped"):
        lines.append(f"{count(prepared['turns_dropped'], 'turn')} of conversations left out.")
    return " ".join(lines)
