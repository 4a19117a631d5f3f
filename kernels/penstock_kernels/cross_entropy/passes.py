"""Selects the implementation of the passes over a chunk's logits."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch

from penstock_kernels.cross_entropy import compiled, cpu, reference
from penstock_kernels.cross_entropy.loss_terms import (
    LogitGradFactors,
    LossOptions,
    SoftmaxStats,
    slopes,
)
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda

Passes = Literal["auto", "compiled"]
"""The best implementation for the logits, or the compiled reference."""

TallyOf = Callable[[torch.Tensor, torch.Tensor, LossOptions], SoftmaxStats]
TurnOf = Callable[[torch.Tensor, torch.Tensor, int, LossOptions], SoftmaxStats]
SlopeOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LogitGradFactors, LossOptions], None]


def _mismatch(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> str | None:
    """Why the arguments do not fit together; None: they do."""
    if labels_C.shape != logits_CV.shape[:1]:
        return f"there are {tuple(labels_C.shape)} labels for logits of {tuple(logits_CV.shape)}"
    if labels_C.dtype != torch.int64:
        return f"labels are {labels_C.dtype}, not int64"
    return None


def _unsupported_tally(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: LossOptions
) -> str | None:
    del terms
    if reason := _mismatch(logits_CV, labels_C):
        return reason
    if logits_CV.dtype == torch.float64:
        return "logits are float64, and it computes in float32"
    if logits_CV.stride(1) != 1:
        return f"logits have strides {logits_CV.stride()}, and those of a row lie apart"
    return needs_cuda(logits_CV, labels_C)


def _unsupported_slope(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> str | None:
    for numbers in (log_sum_C, *slopes):
        if numbers is not None and (numbers.shape != labels_C.shape or not numbers.is_contiguous()):
            return f"numbers of {tuple(labels_C.shape)} tokens are {tuple(numbers.shape)}"
    return _unsupported_tally(logits_CV, labels_C, terms)


def _off_cpu(logits_CV: torch.Tensor, labels_C: torch.Tensor, *args: object) -> str | None:
    del args
    if logits_CV.device.type != "cpu":
        return f"its tensors are on {logits_CV.device.type}, and it needs the cpu"
    return _mismatch(logits_CV, labels_C)


_TALLY: dict[str, KernelImpl[[torch.Tensor, torch.Tensor, LossOptions], SoftmaxStats]] = {
    "rows": KernelImpl(cpu.softmax_stats, _off_cpu)
}
_SLOPE: dict[
    str, KernelImpl[[torch.Tensor, torch.Tensor, torch.Tensor, LogitGradFactors, LossOptions], None]
] = {"rows": KernelImpl(cpu.logits_to_grad_, _off_cpu)}
if HAS_TRITON:
    from penstock_kernels.cross_entropy import triton

    _TALLY = {"triton": KernelImpl(triton.tally, _unsupported_tally, language="triton"), **_TALLY}
    _SLOPE = {"triton": KernelImpl(triton.slope_, _unsupported_slope, language="triton"), **_SLOPE}

tally = Op("tally", reference.softmax_stats, _TALLY)
slope_ = Op("slope_", reference.logits_to_grad_, _SLOPE)


def two_pass(tally: TallyOf, slope_: SlopeOf) -> TurnOf:
    """Statistics of a full vocabulary, then gradients in the logits' place."""

    def turn_(
        logits_CV: torch.Tensor, labels_C: torch.Tensor, entries: int, terms: LossOptions
    ) -> SoftmaxStats:
        stats = tally(logits_CV, labels_C, terms)
        rises = slopes(stats.log_sum, stats.log_sum, entries, terms)
        slope_(logits_CV, labels_C, stats.log_sum, rises, terms)
        return stats

    return turn_


turn_ = Op("turn_", two_pass(tally, slope_), {"rows": KernelImpl(cpu.fused_loss_grad_, _off_cpu)})


class Implementation(NamedTuple):
    """What goes over the logits."""

    tally: TallyOf
    slope_: SlopeOf
    turn_: TurnOf


IMPLEMENTATIONS: Mapping[Passes, Implementation] = {
    "auto": Implementation(tally, slope_, turn_),
    "compiled": Implementation(
        compiled.softmax_stats,
        compiled.logits_to_grad_,
        two_pass(compiled.softmax_stats, compiled.logits_to_grad_),
    ),
}
