"""Paged attention on a CPU: one call for each run of consecutive pages, merged by log-sum-exps.

Consecutive pages lie side by side in memory, so that their keys are a view; gathering them would
copy all keys of a step in every layer. Runs that several sequences share, as completions of one
prompt do, are read once for the queries of all of them. Short runs are gathered after all, because
a call costs more than their copy.

R pairs of a run and a sequence, B sequences, C keys of a run, G query heads of each key head.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from penstock_kernels.attention.paged import reference
from penstock_kernels.attention.paged.pages import PagedSequences
from penstock_kernels.attention.sinks import unsupported_sinks, with_sinks


class _Run(NamedTuple):
    """Keys that lie side by side, and the sequences that have them."""

    first_slot: int
    length: int
    sequences: tuple[int, ...]


class _Gathered(NamedTuple):
    """Short runs of one sequence each."""

    sequences: torch.Tensor | None
    """int64 [R]; None: all in order."""
    slots: torch.Tensor
    """int64 [R, C], padded with a slot of the run."""
    bias_RC: torch.Tensor  # noqa: N815 - R and C name the dimensions
    """-inf for padding, else 0."""


class _Runs(NamedTuple):
    runs: Sequence[_Run]
    queries: Sequence[torch.Tensor | int]
    """The rows of each run's queries: int64, or the only one."""
    gathered: _Gathered | None
    sequence_R: torch.Tensor | None  # noqa: N815 - R names the dimension
    """int64: the sequence of each pair, in the order of the runs, and then of those gathered; None
    if each has one run, and these are in the order of the sequences."""


COPY_BYTES = 1 << 17
"""Keys and values of a run whose copy takes about as long as a call of PyTorch's kernel."""


def unsupported_reason(
    q_TNH: torch.Tensor,
    k_PSKH: torch.Tensor,
    v_PSKH: torch.Tensor,
    sequences: PagedSequences,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """CPUs. No soft cap."""
    del k_PSKH, v_PSKH, sequences, scale, window
    if q_TNH.device.type != "cpu":
        return f"its tensors are on {q_TNH.device.type}, and it needs cpu"
    if soft_cap is not None:
        return f"scores are capped at {soft_cap}, and PyTorch's fused kernels do not cap them"
    return unsupported_sinks(q_TNH, sinks_N)


@torch.no_grad()
def paged_attention(
    q_TNH: torch.Tensor,
    k_PSKH: torch.Tensor,
    v_PSKH: torch.Tensor,
    sequences: PagedSequences,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Same as the reference."""
    assert soft_cap is None, "refused"
    q_TNH = q_TNH.to(k_PSKH.dtype)
    if not sequences.is_decode:
        return _chunks(q_TNH, k_PSKH, v_PSKH, sequences, scale, window, sinks_N)
    q_BKGH = q_TNH.reshape(len(q_TNH), k_PSKH.shape[2], -1, q_TNH.shape[2])
    k_TKH, v_TKH = k_PSKH.flatten(0, 1), v_PSKH.flatten(0, 1)
    token_bytes = 2 * k_TKH[0].numel() * k_TKH.itemsize
    runs, queries, gathered, sequence_R = _runs(sequences, window, COPY_BYTES // token_bytes)
    parts = [
        _of_run(q_BKGH, rows, k_TKH, v_TKH, run, scale)
        for run, rows in zip(runs, queries, strict=True)
    ]
    if gathered:
        parts.append(_of_gathered(q_BKGH, gathered, k_TKH, v_TKH, scale))
    if len(parts) == 1:
        [(y_RNH, lse_RN)] = parts
    else:
        y_RNH, lse_RN = (torch.cat(part) for part in zip(*parts, strict=True))
    if sequence_R is not None:
        y_RNH, lse_RN = _merge(y_RNH, lse_RN, sequence_R, len(q_TNH))
    if sinks_N is not None:
        y_RNH, _ = with_sinks(y_RNH, lse_RN, sinks_N)
    return y_RNH


def _of_run(
    q_BKGH: torch.Tensor,
    rows: torch.Tensor | int,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    run: _Run,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [r, N, H] and log-sum-exps [r, N] of the r sequences that have this run."""
    k_1KCH, v_1KCH = (
        x_TKH.narrow(0, run.first_slot, run.length).transpose(0, 1).unsqueeze(0)
        for x_TKH in (k_TKH, v_TKH)
    )
    if isinstance(rows, int):
        y_1KGH, lse_1KG = _attend(q_BKGH.narrow(0, rows, 1), k_1KCH, v_1KCH, None, scale)
        return y_1KGH.flatten(1, 2), lse_1KG.flatten(1)
    # The query heads of a key head, of all sequences, are batched as queries.
    q_KQH = q_BKGH[rows].transpose(0, 1).flatten(1, 2)
    y_1KQH, lse_1KQ = _attend(q_KQH.unsqueeze(0), k_1KCH, v_1KCH, None, scale)
    y_rNH = y_1KQH[0].unflatten(1, (len(rows), -1)).transpose(0, 1).flatten(1, 2)
    return y_rNH, lse_1KQ[0].unflatten(1, (len(rows), -1)).transpose(0, 1).flatten(1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # The public function does not return the log-sum-exp.
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )


def _of_gathered(
    q_BKGH: torch.Tensor,
    gathered: _Gathered,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [R, N, H] and log-sum-exps [R, N] of short runs."""
    slots, shape = gathered.slots.flatten(), gathered.slots.shape
    q_RKGH = q_BKGH if gathered.sequences is None else q_BKGH[gathered.sequences]
    k_RKCH, v_RKCH = (
        x_TKH.index_select(0, slots).unflatten(0, shape).transpose(1, 2) for x_TKH in (k_TKH, v_TKH)
    )
    bias = gathered.bias_RC.to(q_BKGH.dtype)[:, None, None, :].expand(-1, *q_RKGH.shape[1:3], -1)
    y_RKGH, lse_RKG = _attend(q_RKGH, k_RKCH, v_RKCH, bias, scale)
    return y_RKGH.flatten(1, 2), lse_RKG.flatten(1)


def _merge(
    y_RNH: torch.Tensor, lse_RN: torch.Tensor, sequence_R: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the outputs over parts of the keys: each counts by the sum of its exponentials."""
    index_RN = sequence_R[:, None].expand_as(lse_RN)
    most_BN = lse_RN.new_full((count, lse_RN.shape[1]), -torch.inf)
    most_BN.scatter_reduce_(0, index_RN, lse_RN, "amax")
    weight_RN = (lse_RN - most_BN[sequence_R]).exp_()
    sum_BN = torch.zeros_like(most_BN).index_add_(0, sequence_R, weight_RN)
    y_BNH = weight_RN.new_zeros((count, *y_RNH.shape[1:]))
    y_BNH.index_add_(0, sequence_R, y_RNH * weight_RN.unsqueeze(-1))
    return (y_BNH / sum_BN.unsqueeze(-1)).to(y_RNH.dtype), sum_BN.log_().add_(most_BN)


def _runs(sequences: PagedSequences, window: int | None, short: int) -> _Runs:
    key = "runs", window, short
    if key not in sequences.memo:
        members: dict[tuple[int, int], list[int]] = {}
        for number in range(len(sequences.tables)):
            for run in _of_sequence(sequences, number, window):
                members.setdefault(run, []).append(number)
        runs = [_Run(*run, tuple(numbers)) for run, numbers in members.items()]
        copied = [run for run in runs if run.length <= short and len(run.sequences) == 1]
        if len(copied) > 1:
            runs = [run for run in runs if run not in copied]
        else:
            copied = []
        order = [number for run in (*runs, *copied) for number in run.sequences]
        queries = [
            run.sequences[0] if len(run.sequences) == 1 else torch.tensor(run.sequences)
            for run in runs
        ]
        gathered = _gather(copied, len(sequences.tables)) if copied else None
        in_order = order == list(range(len(sequences.tables)))
        sequence_R = None if in_order else torch.tensor(order)
        sequences.memo[key] = _Runs(runs, queries, gathered, sequence_R)
    return sequences.memo[key]


def _gather(runs: Sequence[_Run], count: int) -> _Gathered:
    numbers = [run.sequences[0] for run in runs]
    length_R1 = torch.tensor([[run.length] for run in runs])
    within_C = torch.arange(int(length_R1.max()))
    first_R1 = torch.tensor([[run.first_slot] for run in runs])
    slots_RC = first_R1 + torch.minimum(within_C, length_R1 - 1)
    bias_RC = torch.zeros(slots_RC.shape).masked_fill_(within_C >= length_R1, -torch.inf)
    is_all = numbers == list(range(count))
    return _Gathered(None if is_all else torch.tensor(numbers), slots_RC, bias_RC)


def _of_sequence(
    sequences: PagedSequences, number: int, window: int | None
) -> list[tuple[int, int]]:
    """First slot and length of each run of a sequence's visible keys.

    A run ends where pages are shared by other sequences than before, so that a common prompt is one
    run of all its completions.
    """
    size, end = sequences.page_size, sequences.num_keys[number]
    first = sequences.first_key(number, window)
    pages = sequences.tables[number][first // size : -(-end // size)]
    shared = _shares(sequences)
    cuts = [
        index
        for index, (page, following) in enumerate(pairwise(pages), 1)
        if following != page + 1 or shared[following] != shared[page]
    ]
    runs: list[tuple[int, int]] = []
    for begin, stop in pairwise((0, *cuts, len(pages))):
        # Of the sequence's tokens, those of the run that are visible.
        low = max(first, (first // size + begin) * size)
        high = min(end, (first // size + stop) * size)
        runs.append((pages[begin] * size + low % size, high - low))
    return runs


def _shares(sequences: PagedSequences) -> dict[int, int]:
    """The number of sequences that have each page."""
    if "shares" not in sequences.memo:
        counts: dict[int, int] = {}
        for table, end in zip(sequences.tables, sequences.num_keys, strict=True):
            for page in table[: -(-end // sequences.page_size)]:
                counts[page] = counts.get(page, 0) + 1
        sequences.memo["shares"] = counts
    return sequences.memo["shares"]


def _chunks(
    q_TNH: torch.Tensor,
    k_PSKH: torch.Tensor,
    v_PSKH: torch.Tensor,
    sequences: PagedSequences,
    scale: float,
    window: int | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    # With many queries of a sequence its keys are copied: little beside the products.
    outputs: list[torch.Tensor] = []
    for number, q_QNH in enumerate(q_TNH.split(list(sequences.num_queries))):
        queries, end = len(q_QNH), sequences.num_keys[number]
        first = sequences.first_key(number, window)
        k_CKH, v_CKH = (
            reference.gather_keys(x, sequences, number, first) for x in (k_PSKH, v_PSKH)
        )
        groups = q_QNH.shape[1] // k_CKH.shape[1]
        q_1NQH = q_QNH.transpose(0, 1).unsqueeze(0)
        k_1NCH, v_1NCH = (
            x.repeat_interleave(groups, dim=1).transpose(0, 1).unsqueeze(0) for x in (k_CKH, v_CKH)
        )
        own_Q1 = torch.arange(end - queries, end).unsqueeze(1)
        key_C = torch.arange(first, end)
        hidden_QC = key_C > own_Q1
        if window is not None:
            hidden_QC |= key_C <= own_Q1 - window
        bias_QC = q_QNH.new_zeros(hidden_QC.shape).masked_fill_(hidden_QC, float("-inf"))
        y_1NQH, lse_1NQ = _attend(q_1NQH, k_1NCH, v_1NCH, bias_QC, scale)
        y_QNH = y_1NQH[0].transpose(0, 1)
        if sinks_N is not None:
            y_QNH, _ = with_sinks(y_QNH, lse_1NQ[0].transpose(0, 1), sinks_N)
        outputs.append(y_QNH)
    return torch.cat(outputs)
