"""What people should look at, the gravest first, and spikes that nobody need worry about."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock.core.remote.urls import redact_text

MOST_TOLD = 200
"""Warnings of either kind; of more, the newest."""
AFTER = 20
"""Steps after a spike whose median says whether the loss has come back."""
LEAST_AFTER = 5
"""So many of them have to be there."""
BACK = 0.5
"""The loss has come back if no more than this share of the rise is left."""

Rows = list[tuple[str, str]]
"""(place, text)."""


@dataclass(frozen=True)
class Warnings:
    """Everything a run warned of."""

    told: Rows
    """First what was found of the run's size, then the rest, the newest first."""
    passing: Rows
    """Spikes that the loss came back from, the highest first."""


def warnings_of(
    records: Iterable[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, str]],
) -> Warnings:
    """Those among `records`, judged by the records of steps, and `findings`, the gravest first."""
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
