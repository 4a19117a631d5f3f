"""Selects the implementation of the passes over a chunk's logits, and extends them to tokens with
several labels each, such as a teacher's top-k tokens.

C tokens of a chunk, K labels of each, V entries of the local vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from penstock_kernels.cross_entropy import cpu, reference
from penstock_kernels.cross_entropy.loss_terms import (
    LogitGradFactors,
    LossOptions,
    SoftmaxStats,
    slopes,
)
from penstock_kernels.op import KernelImpl, Op, needs_cuda, triton_backend

Passes = Literal["auto", "compiled"]
"""The best implementation for the logits, or the compiled reference."""

TallyOf = Callable[[torch.Tensor, torch.Tensor, LossOptions], SoftmaxStats]
TurnOf = Callable[[torch.Tensor, torch.Tensor, int, LossOptions], SoftmaxStats]
SlopeOf = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LogitGradFactors, LossOptions], None]


def _mismatch(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> str | None:
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


def _off_cpu(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, *args: Any, **kwargs: Any
) -> str | None:
    del args, kwargs
    if logits_CV.device.type != "cpu":
        return f"its tensors are on {logits_CV.device.type}, and it needs the cpu"
    return _mismatch(logits_CV, labels_C)


tally = Op(
    "tally",
    reference.softmax_stats,
    {
        **triton_backend("cross_entropy.triton:tally", _unsupported_tally),
        "rows": KernelImpl(cpu.softmax_stats, _off_cpu),
    },
)
slope_ = Op(
    "slope_",
    reference.logits_to_grad_,
    {
        **triton_backend("cross_entropy.triton:slope_", _unsupported_slope),
        "rows": KernelImpl(cpu.logits_to_grad_, _off_cpu),
    },
)


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


@cache
def _compiled(terms: LossOptions) -> tuple[Any, Any]:
    """The reference as compiled by `torch.compile`: a loop or a kernel for each pass.

    Compilation takes seconds, and a C++ compiler on a CPU.
    """

    def tally(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> SoftmaxStats:
        return reference.softmax_stats(logits_CV, labels_C, terms)

    def slope_(
        logits_CV: torch.Tensor,
        labels_C: torch.Tensor,
        log_sum_C: torch.Tensor,
        share_C: torch.Tensor,
        hit_C: torch.Tensor,
        floor_C: torch.Tensor | None,
    ) -> None:
        slopes = LogitGradFactors(share_C, hit_C, floor_C)
        reference.logits_to_grad_(logits_CV, labels_C, log_sum_C, slopes, terms)

    # The last chunk has fewer tokens than the others.
    return torch.compile(tally, dynamic=True), torch.compile(slope_, dynamic=True)


# Compiled functions get `data`: a chunk is a view, and the number of rows of its base would be
# compiled in.
def _compiled_tally(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: LossOptions
) -> SoftmaxStats:
    return _compiled(terms)[0](logits_CV.data, labels_C)


def _compiled_slope_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> None:
    _compiled(terms)[1](logits_CV.data, labels_C, log_sum_C, *slopes)


IMPLEMENTATIONS: Mapping[Passes, Implementation] = {
    "auto": Implementation(tally, slope_, turn_),
    "compiled": Implementation(
        _compiled_tally, _compiled_slope_, two_pass(_compiled_tally, _compiled_slope_)
    ),
}


def tally_by(
    tally: TallyOf, logits_CV: torch.Tensor, labels: torch.Tensor, terms: LossOptions
) -> SoftmaxStats:
    """A pass for labels [C], extended to labels [C, K] with a target for each, [C, K]. A label of
    -1 is not among the logits.

    The log-sum-exp is computed once for all labels of a token, by the pass with a label of -1.
    """
    if labels.dim() == 1:
        return tally(logits_CV, labels, terms)
    stats = tally(logits_CV, _nowhere(labels), terms)
    # `gather` takes no -1: such labels read entry 0, and are masked below.
    own_CK = reference.capped(logits_CV.gather(1, labels.clamp(min=0)), terms)
    return stats._replace(target=own_CK.masked_fill(labels < 0, 0))


def slope_by_(
    slope_: SlopeOf,
    logits_CV: torch.Tensor,
    labels: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> None:
    """A pass for labels [C], extended to labels [C, K] with a `hit` for each, [C, K]. Duplicate
    labels of a token count twice.
    """
    if labels.dim() == 1:
        slope_(logits_CV, labels, log_sum_C, slopes, terms)
        return
    at_CK, hit_CK = labels.clamp(min=0), slopes.hit.masked_fill(labels < 0, 0)
    if terms.soft_cap is not None:
        # Before the pass below, which writes gradients over the logits.
        own_CK = reference.capped(logits_CV.gather(1, at_CK), terms)
        hit_CK = hit_CK * (1 - (own_CK / terms.soft_cap).square())
    # No floor: several labels have no smoothing.
    shares = LogitGradFactors(slopes.share, torch.zeros_like(slopes.share), None)
    slope_(logits_CV, _nowhere(labels), log_sum_C, shares, terms)
    logits_CV.scatter_add_(1, at_CK, -hit_CK.to(logits_CV.dtype))


def _nowhere(labels_CK: torch.Tensor) -> torch.Tensor:
    return labels_CK.new_full(labels_CK.shape[:1], -1)
