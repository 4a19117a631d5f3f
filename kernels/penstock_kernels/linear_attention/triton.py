"""Linear attention on Triton: launches, and the operator.

What needs states in order is a scan by document, head and block of the values' width; all else is
done for all chunks at once. Chunks are found on the device, from the documents' borders: there are
at most T / 64 and one for each document.
"""

# pyright: reportArgumentType=false

from typing import Any

import torch

from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.linear_attention import triton_backward as backward
from penstock_kernels.linear_attention import triton_forward as forward
from penstock_kernels.linear_attention.autograd import differentiable
from penstock_kernels.op import INTERPRETED

CHUNK = 64
DOCUMENTS = 128
"""Documents that a program counts at a time."""
SUMMED = 64
"""Channels whose decays a program sums."""

PRODUCT_WARPS, GRADIENT_WARPS = 8, 8
"""Of kernels with several tiles of sums."""


def tile_of_scan(K: int, V: int) -> dict[str, int]:
    """The part of a state in one program: 64 or more programs for each document and 32 heads."""
    block = max(16, next_power_of_2(K))
    across = 32 if block <= 128 else 16
    across = min(across, max(16, next_power_of_2(V)))
    return {"BLOCK_K": block, "BLOCK_V": across, "num_warps": 8, "num_stages": 1}


def tile(K: int, V: int, itemsize: int) -> dict[str, int]:
    """Channels and values that other programs take at a time."""
    most = 64 if itemsize == 2 else 32
    across, wide = (min(most, max(16, next_power_of_2(width))) for width in (K, V))
    return {"BLOCK_K": across, "BLOCK_V": wide, "num_warps": 4, "num_stages": 1}


def _planned(cu_seqlens: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Chunks and each document's first; and how many there may be."""
    documents = len(cu_seqlens) - 1
    # An upper bound: the number itself is known on the GPU alone.
    num_chunks = num_tokens // CHUNK + documents
    chunks = cu_seqlens.new_empty(num_chunks, 2)
    firsts = cu_seqlens.new_empty(documents + 1)
    size = {"BLOCK": DOCUMENTS}
    forward.plan[(documents + 1,)](cu_seqlens, chunks, firsts, documents, num_chunks, **size)
    return chunks, firsts, num_chunks


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, final states, and for the backward pass: deltas, sums of log decays, scores, the delta
    rule's solution."""
    q, k, v, log_decay = (x.contiguous() for x in (q, k, v, log_decay))
    beta, initial = (None if x is None else x.contiguous() for x in (beta, initial))
    (T, G, K), (N, V) = k.shape, v.shape[1:]
    chunks, firsts, num_chunks = _planned(cu_seqlens, T)
    y, deltas, sums, scores, solution = _kept(k, v, log_decay, beta)
    final = v.new_empty(len(firsts) - 1, N, K, V, dtype=torch.float32)
    flags, sizes = {"CHANNELS": log_decay.ndim == 3, "UPCAST": INTERPRETED}, (G, N, K)
    small = tile(K, V, k.element_size())
    width = K if log_decay.ndim == 3 else 1
    block = min(SUMMED, next_power_of_2(width))
    forward.sum_decays[(num_chunks, N, cdiv(width, block))](
        log_decay, chunks, sums, N, width, BLOCK=block
    )
    forward.make_products[(num_chunks, N)](
        *(q, k, sums, beta, chunks, scores, solution, scale, *sizes),
        BLOCK=small["BLOCK_K"],
        **flags,
        **{"num_warps": PRODUCT_WARPS, "num_stages": 1},
    )
    # In the dtype of v: products round their operands to it anyway. The scan itself goes on in
    # fp32.
    states = v.new_empty(num_chunks, N, K, V)
    scan = tile_of_scan(K, V)
    forward.scan_states[(len(firsts) - 1, N, cdiv(V, scan["BLOCK_V"]))](
        *(k, v, sums, beta, solution, deltas, initial, chunks, firsts, states, final),
        *sizes,
        V,
        SOLVED=False,
        **flags,
        **scan,
    )
    forward.read_states[(num_chunks, N, cdiv(V, small["BLOCK_V"]))](
        *(q, v, sums, beta, deltas, scores, chunks, states, y, scale), *sizes, V, **flags, **small
    )
    return y, final, deltas, sums, scores, solution


def _kept(
    k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Memory for the results but the final states."""
    has_rule = beta is not None
    by_chunk = *v.shape[:2], CHUNK
    return (
        v.new_empty(v.shape),
        v.new_empty(v.shape if has_rule else (0,)),
        log_decay.new_empty(log_decay.shape, dtype=torch.float32),
        k.new_empty(by_chunk),
        k.new_empty(by_chunk if has_rule else (0,)),
    )


def _run_fake(
    _: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    *further: Any,
) -> tuple[torch.Tensor, ...]:
    _, cu_seqlens, _ = further
    states = len(cu_seqlens) - 1, v.shape[1], k.shape[2], v.shape[2]
    y, *saved = _kept(k, v, log_decay, beta)
    return y, v.new_empty(states, dtype=torch.float32), *saved


def _gradients(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    deltas: torch.Tensor,
    sums: torch.Tensor,
    scores: torch.Tensor,
    solution: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dy, q, k, v = (x.contiguous() for x in (dy, q, k, v))
    beta, initial, dfinal = (None if x is None else x.contiguous() for x in (beta, initial, dfinal))
    (T, G, K), (N, V) = k.shape, v.shape[1:]
    by_channel = log_decay.ndim == 3
    chunks, firsts, num_chunks = _planned(cu_seqlens, T)
    documents, small, scan = len(firsts) - 1, tile(K, V, k.element_size()), tile_of_scan(K, V)
    blocks_k, blocks_v = cdiv(K, small["BLOCK_K"]), cdiv(V, scan["BLOCK_V"])
    flags = {"CHANNELS": by_channel, "UPCAST": INTERPRETED}
    states, dstates = v.new_empty(num_chunks, N, K, V), v.new_empty(num_chunks, N, K, V)
    # States are computed again from the saved deltas: K x V numbers for each chunk are not kept.
    forward.scan_states[(documents, N, blocks_v)](
        *(k, v, sums, beta, None, deltas, initial, chunks, firsts, states, None),
        *(G, N, K, V),
        SOLVED=True,
        **flags,
        **scan,
    )
    dv, dinitial = v.new_empty(v.shape), q.new_empty(0)
    if initial is not None:
        dinitial = initial.new_empty(initial.shape)
    # A part of each block of values: added up afterwards, in the same order every time.
    dbeta = v.new_empty((0,) if beta is None else (blocks_v, T, N), dtype=torch.float32)
    backward.scan_gradients[(documents, N, blocks_v)](
        *(q, k, dy, sums, beta, scores, solution, deltas, dfinal, chunks, firsts),
        *(dstates, dv, dbeta, None if initial is None else dinitial),
        scale,
        *(T, G, N, K, V),
        **flags,
        **scan,
    )
    # Heads that share a key have a gradient each, unrounded until they are added up.
    dq, dk = (k.new_empty(T, N, K, dtype=torch.float32 if N > G else None) for _ in range(2))
    parts = sums.shape if by_channel else (blocks_k, T, N)
    dlog_decay = sums.new_empty(parts)
    backward.make_gradients[(num_chunks, N, blocks_k)](
        *(q, k, v, dy, dv, sums, beta, deltas, chunks, states, dstates, dq, dk, dlog_decay),
        scale,
        *(T, G, N, K, V),
        **flags,
        **{**small, "num_warps": GRADIENT_WARPS},
    )
    if N > G:
        dq, dk = (x.view(T, G, N // G, K).sum(2).to(k.dtype) for x in (dq, dk))
    if not by_channel:
        dlog_decay = dlog_decay.sum(0)
    dbeta = q.new_empty(0) if beta is None else dbeta.sum(0).to(beta.dtype)
    return dq, dk, dv, dlog_decay.to(log_decay.dtype), dbeta, dinitial


linear_attention = differentiable("linear_attention", _run, _run_fake, _gradients, num_saved=4)
"""Same as the reference. States are in fp32; products are of operands in the dtype of k."""
