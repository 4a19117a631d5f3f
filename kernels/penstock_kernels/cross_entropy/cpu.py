"""The passes on a CPU: a few rows at a time, which stay in a core's caches for all operations. A
pass over logits outside the caches would wait for memory.

C tokens of a chunk, R of them at a time, V entries of the vocabulary.
"""

from collections.abc import Iterator

import torch

from penstock_kernels.cross_entropy.loss_terms import (
    LogitGradFactors,
    LossOptions,
    SoftmaxStats,
    slopes,
)

# Numbers at a time for a core, where rows are shorter: 2 MiB in fp32. Of fewer, calls cost more
# than memory does.
EACH = 512 * 1024


def softmax_stats(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: LossOptions
) -> SoftmaxStats:
    """Same as the reference."""
    stats = _unfilled(logits_CV, terms)
    for rows, y_RV in _blocks(logits_CV):
        _read(y_RV, logits_CV[rows], terms)
        _to_shares(y_RV, labels_C[rows], stats, rows)
    return stats


def logits_to_grad_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> None:
    """Same as the reference. It does not use the sums, which its softmax recomputes."""
    del log_sum_C
    for rows, y_RV in _blocks(logits_CV):
        bend_RV = _read(y_RV, logits_CV[rows], terms)
        torch.softmax(y_RV, 1, out=y_RV)
        floor = None if slopes.floor is None else slopes.floor[rows]
        rises = LogitGradFactors(slopes.share[rows], slopes.hit[rows], floor)
        _to_slopes(y_RV, bend_RV, labels_C[rows], rises)
        logits_CV[rows].copy_(y_RV)


def fused_loss_grad_(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, entries: int, terms: LossOptions
) -> SoftmaxStats:
    """Both passes at once, with one softmax."""
    stats = _unfilled(logits_CV, terms)
    for rows, y_RV in _blocks(logits_CV):
        bend_RV = _read(y_RV, logits_CV[rows], terms)
        _to_shares(y_RV, labels_C[rows], stats, rows)
        log_sum_R = stats.log_sum[rows]
        rises = slopes(log_sum_R, log_sum_R, entries, terms)
        _to_slopes(y_RV, bend_RV, labels_C[rows], rises)
        logits_CV[rows].copy_(y_RV)
    return stats


def _read(y_RV: torch.Tensor, logits_RV: torch.Tensor, terms: LossOptions) -> torch.Tensor | None:
    """Fill `y` with the (soft-capped) logits; return the derivative of the cap, if there is one."""
    y_RV.copy_(logits_RV)
    if terms.soft_cap is None:
        return None
    y_RV.div_(terms.soft_cap).tanh_()
    bend_RV = 1 - y_RV.square()
    y_RV.mul_(terms.soft_cap)
    return bend_RV


def _to_shares(y_RV: torch.Tensor, label_R: torch.Tensor, stats: SoftmaxStats, rows: slice) -> None:
    """Replace logits by softmax probabilities, and fill in the statistics."""
    target_R = y_RV.gather(1, label_R.clamp(min=0)[:, None]).squeeze(1)
    stats.target[rows] = target_R.masked_fill_(label_R < 0, 0)
    if stats.total is not None:
        torch.sum(y_RV, 1, out=stats.total[rows])
    largest_R = y_RV.amax(1)
    # Torch has one fused pass for it, with exponentials twice as fast as those of `exp`; and the
    # largest share, that of an exponential of 1, tells by what all were divided.
    torch.softmax(y_RV, 1, out=y_RV)
    torch.sub(largest_R, y_RV.amax(1).log_(), out=stats.log_sum[rows])


def _to_slopes(
    y_RV: torch.Tensor, bend_RV: torch.Tensor | None, label_R: torch.Tensor, rises: LogitGradFactors
) -> None:
    y_RV.mul_(rises.share[:, None])
    if rises.floor is not None:
        y_RV.sub_(rises.floor[:, None])
    # `scatter_add_` cannot leave out a row: for a label of -1 it adds 0 to entry 0.
    hit_R = rises.hit.masked_fill(label_R < 0, 0)
    y_RV.scatter_add_(1, label_R.clamp(min=0)[:, None], -hit_R[:, None])
    if bend_RV is not None:
        y_RV.mul_(bend_RV)


def _unfilled(logits_CV: torch.Tensor, terms: LossOptions) -> SoftmaxStats:
    log_sum_C = _precise(logits_CV, len(logits_CV))
    total_C = torch.empty_like(log_sum_C) if terms.smoothing else None
    return SoftmaxStats(log_sum_C, torch.empty_like(log_sum_C), total_C)


def _blocks(logits_CV: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The next rows, and a buffer for them; its contents may be overwritten."""
    count, width = logits_CV.shape
    # Softmax is parallelized over rows.
    block_rows = torch.get_num_threads() * max(1, EACH // max(1, width))
    scratch_RV = _precise(logits_CV, min(block_rows, count), width)
    for start in range(0, count, block_rows):
        stop = min(start + block_rows, count)
        yield slice(start, stop), scratch_RV[: stop - start]


def _precise(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))
