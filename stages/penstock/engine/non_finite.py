"""Locate non-finite gradients: the ranks, packed sequences and parameters, for the error message.

The weights are still those of the last good step, so each micro-batch's loss can be computed again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.rows.collate import MicroBatch

MAX_LISTED = 12
"""How many packed sequences a message lists; the rest are counted."""


@dataclass(frozen=True)
class NonFiniteReport:
    """What one rank found."""

    rows: tuple[int, ...]
    """Packed sequences of the micro-batches with a non-finite loss."""
    loss: float
    parameter: str | None
    """The first parameter whose local gradient is not finite."""
    all_rows: tuple[int, ...]
    """Packed sequences of the whole step on this rank."""


def locate_non_finite(
    batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch], float],
    trained: Sequence[LocalParam],
    ranks: ProcessInfo,
) -> str:
    """The ranks, packed sequences and parameters, in one or two sentences. Collective. `loss_of`
    recomputes one micro-batch's loss, without gradients."""
    losses = [(batch, loss_of(batch)) for batch in batches]
    non_finite = [(batch, loss) for batch, loss in losses if not math.isfinite(loss)]
    with torch.no_grad():
        gradients = ((p.name, p.parameter.grad) for p in trained if p.parameter.grad is not None)
        first = next((n for n, grad in gradients if not torch.isfinite(local(grad)).all()), None)
    report = NonFiniteReport(
        rows=packed_row_numbers([batch for batch, _ in non_finite]),
        loss=sum(loss for _, loss in non_finite),
        parameter=first,
        all_rows=packed_row_numbers(batches),
    )
    return format_reports(ranks.all_gather(report))


def format_reports(reports: Sequence[NonFiniteReport]) -> str:
    """The message, from the reports of all ranks in rank order."""
    non_finite = {rank: report for rank, report in enumerate(reports) if report.rows}
    lines: list[str] = []
    for rank, report in list(non_finite.items())[:MAX_LISTED]:
        rows = format_rows(report.rows)
        lines.append(f"On rank {rank} the loss of packed row(s) {rows} is {report.loss:g}.")
    if not non_finite:
        rows = sorted({row for report in reports for row in report.all_rows})
        lines.append(
            "Every micro-batch's loss is finite, so it overflowed on the way back; the step's "
            f"packed row(s) are {format_rows(rows)}."
        )
    for rank, report in enumerate(reports):
        if name := report.parameter:
            lines.append(f"The first parameter with such a gradient is {name} (rank {rank}).")
            break
    return "\n  ".join(lines)


def packed_row_numbers(batches: Sequence[MicroBatch]) -> tuple[int, ...]:
    """The indices of their packed sequences."""
    return tuple(number for batch in batches for number, _ in batch.rows)


def format_rows(rows: Sequence[int]) -> str:
    """The first indices, and the number of the others."""
    first = ", ".join(str(row) for row in rows[:MAX_LISTED])
    more = len(rows) - MAX_LISTED
    return f"{first} and {more} more" if more > 0 else first or "none"
