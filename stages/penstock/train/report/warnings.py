"""Warnings of a run, most severe first, and loss spikes that recovered."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock.core.remote.urls import redact_text

MAX_WARNINGS = 200
"""Maximum warnings of either kind; the newest are kept."""
RECOVERY_STEPS = 20
"""Steps after a spike whose median determines whether the loss recovered."""
MIN_RECOVERY_STEPS = 5
"""Minimum number of them."""
MAX_REMAINING = 0.5
"""The loss has recovered if at most this fraction of the increase remains."""

Rows = list[tuple[str, str]]
"""(place, text)."""


@dataclass(frozen=True)
class Warnings:
    """All warnings of a run."""

    active: Rows
    """Size warnings first, then the rest, newest first."""
    recovered: Rows
    """Spikes that recovered, highest first."""


def collect_warnings(
    records: Iterable[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, str]],
) -> Warnings:
    """The warnings in `records`, and `findings`, most severe first."""
    active: Rows = []
    recovered: list[tuple[float, tuple[str, str]]] = []
    for record in records:
        if "warning" not in record:
            continue
        row = (f"step {record['step']:,}", redact_text(record["warning"]))
        spike = record.get("spike")
        if spike and _has_recovered(spike, record["step"], steps):
            recovered.append((spike["loss"], row))
        else:
            active.append(row)
    recovered.sort(key=lambda item: -item[0])
    return Warnings(
        active=[*(("run", item["text"]) for item in findings), *reversed(active[-MAX_WARNINGS:])],
        recovered=[row for _, row in recovered[:MAX_WARNINGS]],
    )


def _has_recovered(
    spike: Mapping[str, float], step: int, steps: Sequence[Mapping[str, Any]]
) -> bool:
    following = (record for record in steps if step < record["step"] <= step + RECOVERY_STEPS)
    later = [record["loss"] for record in following if record["loss"] is not None]
    if len(later) < MIN_RECOVERY_STEPS:
        return False
    return median(later) - spike["usual"] <= MAX_REMAINING * (spike["loss"] - spike["usual"])
