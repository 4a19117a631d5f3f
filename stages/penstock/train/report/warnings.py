"""Warnings of a run, most severe first, and loss spikes that recovered."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock.core.remote.urls import redact_text

MOST_TOLD = 200
"""Maximum warnings of either kind; the newest are kept."""
AFTER = 20
"""Steps after a spike whose median determines whether the loss recovered."""
LEAST_AFTER = 5
"""Minimum number of them."""
BACK = 0.5
"""The loss has recovered if at most this fraction of the increase remains."""

Rows = list[tuple[str, str]]
"""(place, text)."""


@dataclass(frozen=True)
class Warnings:
    """All warnings of a run."""

    told: Rows
    """Size warnings first, then the rest, newest first."""
    passing: Rows
    """Spikes that recovered, highest first."""


def warnings_of(
    records: Iterable[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, str]],
) -> Warnings:
    """The warnings in `records`, and `findings`, most severe first."""
    told: Rows = []
    passing: list[tuple[float, tuple[str, str]]] = []
    for record in records:
        if "warning" not in record:
            continue
        row = (f"step {record['step']:,}", redact_text(record["warning"]))
        spike = record.get("spike")
        if spike and _came_back(spike, record["step"], steps):
            passing.append((spike["loss"], row))
        else:
            told.append(row)
    passing.sort(key=lambda each: -each[0])
    return Warnings(
        told=[
            *(("run", each["text"]) for each in findings),
            *reversed(told[-MOST_TOLD:]),
        ],
        passing=[row for _, row in passing[:MOST_TOLD]],
    )


def _came_back(spike: Mapping[str, float], step: int, steps: Sequence[Mapping[str, Any]]) -> bool:
    later = [each["loss"] for each in steps if step < each["step"] <= step + AFTER]
    if len(later) < LEAST_AFTER:
        return False
    return median(later) - spike["usual"] <= BACK * (spike["loss"] - spike["usual"])
