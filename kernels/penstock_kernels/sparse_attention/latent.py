"""Sparse attention to latent vectors, as an operator whose kernels are in `triton_latent.py`.

T tokens, N heads, R size of a latent vector, P features with RoPE, S selected tokens.
"""

# pyright: reportArgumentType=false

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.custom_op import fake_like, operator
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.op import INTERPRETED, needs_cuda, needs_floats
from penstock_kernels.sparse_attention import triton_latent
from penstock_kernels.tuning import shared_memory_per_block

LEAST = 16
"""The least size of a tile of a product."""
LEAST_SHARED_MEMORY = 101_376
"""Bytes that a thread block may use on every GPU that kernels run on."""


class Tile(NamedTuple):
    """What a program takes at once, and how it is launched."""

    heads: int
    keys: int
    warps: int
    stages: int

    def options(self, heads: int, rank: int, rope: int) -> dict[str, int]:
        """Constants and launch options, for so many heads and features."""
        return {
            "HEADS": min(self.heads, max(LEAST, next_power_of_2(heads))),
            "KEYS": self.keys,
            "RANK": max(LEAST, next_power_of_2(rank)),
            "ROPE": max(LEAST, next_power_of_2(rope)),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Of the gradients of keys that are in memory at a time where they are added in order. Enough for
# programs on all multiprocessors.
PARTS_BYTES = 1 << 30
ADDED = {"KEYS": 16, "PARTS": 4}
"""Keys of a program that adds in order, and what it adds at once."""

NumBytes = Callable[[Tile, int, int, int], int]
"""Shared memory of a tile, for the sizes R and P, and the bytes of a number."""

# By preference; the accumulated tiles stay in registers, which larger ones would spill.
FORWARD = (Tile(64, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 1))
BACKWARD = (Tile(32, 16, 8, 1), Tile(16, 16, 8, 1))


def forward_bytes(tile: Tile, rank: int, rope: int, itemsize: int) -> int:
    """Shared memory of the forward pass, at most; a B200, which has enough, uses more."""
    return (tile.heads + tile.stages * tile.keys) * (rank + rope) * itemsize + 1024


def backward_bytes(tile: Tile, rank: int, rope: int, itemsize: int) -> int:
    """Shared memory of the backward pass, at most."""
    return (tile.heads * (2 * rank + rope) + 2 * tile.keys * rank) * itemsize + 1024


def choose_tile(
    tiles: Sequence[Tile], num_bytes: NumBytes, rank: int, rope: int, itemsize: int, limit: int
) -> Tile:
    """The first that takes no more shared memory than `limit`, or the last."""
    fits = (tile for tile in tiles if num_bytes(tile, rank, rope, itemsize) <= limit)
    return next(fits, tiles[-1])


def unsupported_reason(
    q_TNR: torch.Tensor,
    q_TNP: torch.Tensor,
    latent_TR: torch.Tensor,
    k_TP: torch.Tensor,
    selected_TS: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
) -> str | None:
    """Why inputs are not supported; None if they are. Only the dtype and device are read of q_TNR:
    queries that are yet to be projected may stand for it."""
    del segments, scale
    tensors = q_TNR, q_TNP, latent_TR, k_TP
    if reason := needs_floats(q_TNR) or needs_cuda(*tensors, selected_TS):
        return reason
    if len({tensor.dtype for tensor in tensors}) > 1:
        return "queries and keys are of several dtypes"
    sizes = latent_TR.shape[-1], k_TP.shape[-1], latent_TR.element_size()
    needed = max(forward_bytes(FORWARD[-1], *sizes), backward_bytes(BACKWARD[-1], *sizes))
    if needed > LEAST_SHARED_MEMORY:
        return f"vectors of {sizes[0]} + {sizes[1]} features in {latent_TR.dtype} do not fit"
    return None


def _launch(
    tiles: Sequence[Tile],
    num_bytes: NumBytes,
    q_TNR: torch.Tensor,
    k_TP: torch.Tensor,
    selected_TS: torch.Tensor,
) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """The grid, the sizes S, N, R, P and the blocks of heads, and the constants of a launch."""
    (tokens, heads, rank), rope = q_TNR.shape, k_TP.shape[-1]
    limit = shared_memory_per_block(q_TNR.device)
    tile = choose_tile(tiles, num_bytes, rank, rope, q_TNR.element_size(), limit)
    options: dict[str, Any] = tile.options(heads, rank, rope)
    # bfloat16 products need it in the interpreter.
    options["UPCAST"] = INTERPRETED
    blocks = cdiv(heads, options["HEADS"])
    return (tokens * blocks,), (selected_TS.shape[-1], heads, rank, rope, blocks), options


def _forward(
    q_TNR: torch.Tensor,
    q_TNP: torch.Tensor,
    latent_TR: torch.Tensor,
    k_TP: torch.Tensor,
    selected_TS: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel writes rows without gaps, and empty_like alone keeps the strides of q.
    y_TNR = torch.empty_like(q_TNR, memory_format=torch.contiguous_format)
    log_sum_TN = q_TNR.new_empty(q_TNR.shape[:2], dtype=torch.float32)
    q_TNR, q_TNP = map(_with_whole_rows, (q_TNR, q_TNP))
    grid, sizes, options = _launch(FORWARD, forward_bytes, q_TNR, k_TP, selected_TS)
    if q_TNR.numel():
        triton_latent.attend[grid](
            *(q_TNR, q_TNP, latent_TR.contiguous(), k_TP.contiguous(), selected_TS),
            *(y_TNR, log_sum_TN, scale, *sizes, *q_TNR.stride()[:2], *q_TNP.stride()[:2]),
            **options,
        )
    return y_TNR, log_sum_TN


def _fake(q_TNR: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    log_sum_TN = q_TNR.new_empty(q_TNR.shape[:2], dtype=torch.float32)
    return q_TNR.new_empty(q_TNR.shape), log_sum_TN


def _backward(
    q_TNR: torch.Tensor,
    q_TNP: torch.Tensor,
    latent_TR: torch.Tensor,
    k_TP: torch.Tensor,
    selected_TS: torch.Tensor,
    y_TNR: torch.Tensor,
    dy_TNR: torch.Tensor,
    log_sum_TN: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dq_rope = (
        torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q_TNR, q_TNP)
    )
    rank, rope = latent_TR.shape[-1], k_TP.shape[-1]
    dkeys_TL = torch.zeros(
        (len(latent_TR), rank + rope), dtype=torch.float32, device=latent_TR.device
    )
    q_TNR, q_TNP, dy_TNR = map(_with_whole_rows, (q_TNR, q_TNP, dy_TNR))
    latent_TR, k_TP = latent_TR.contiguous(), k_TP.contiguous()
    _, sizes, options = _launch(BACKWARD, backward_bytes, q_TNR, k_TP, selected_TS)
    blocks, slots = sizes[-1], selected_TS.shape[1]
    is_in_order = torch.are_deterministic_algorithms_enabled()

    def add_gradients(own: slice, dkeys: torch.Tensor) -> None:
        strides = *q_TNR.stride()[:2], *q_TNP.stride()[:2], *dy_TNR.stride()[:2]
        triton_latent.add_gradients[(len(q_TNR[own]) * blocks,)](
            *(q_TNR[own], q_TNP[own], latent_TR, k_TP, selected_TS[own], y_TNR[own]),
            *(dy_TNR[own], log_sum_TN[own], dq[own], dq_rope[own], dkeys),
            *(scale, *sizes, *strides),
            IN_ORDER=is_in_order,
            **options,
        )

    if q_TNR.numel() and not is_in_order:
        add_gradients(slice(None), dkeys_TL)
    elif q_TNR.numel():
        block_tokens = max(1, PARTS_BYTES // (slots * blocks * dkeys_TL.shape[1] * 4))
        block_tokens = min(block_tokens, len(q_TNR))
        parts = dkeys_TL.new_empty((block_tokens, slots, blocks, dkeys_TL.shape[1]))
        for start in range(0, len(q_TNR), block_tokens):
            own = slice(start, start + block_tokens)
            add_gradients(own, parts)
            _add_in_order(parts, selected_TS[own], dkeys_TL)
    # Not .to(): in fp32 it returns views of one tensor, and an operator returns new memory.
    dlatent_TR, dk_TP = (
        torch.empty_like(part).copy_(gradient)
        for part, gradient in zip((latent_TR, k_TP), dkeys_TL.split((rank, rope), -1), strict=True)
    )
    return dq, dq_rope, dlatent_TR, dk_TP


def _add_in_order(parts: torch.Tensor, selected_CS: torch.Tensor, dkeys_TL: torch.Tensor) -> None:
    """Each key's gradients in the order of the queries and slots that they are from."""
    tokens, width = dkeys_TL.shape
    # Stable: the pairs of a key stay in the order of their queries. NO_KEY, which is -1, is sorted
    # before the first border and so is added nowhere.
    key_of_pair, order = selected_CS.flatten().sort(stable=True)
    borders = torch.arange(tokens + 1, dtype=torch.int32, device=dkeys_TL.device)
    starts = torch.searchsorted(key_of_pair, borders, out_int32=True)
    sizes = tokens, parts.shape[2], width
    triton_latent.add_in_order[(cdiv(tokens, ADDED["KEYS"]),)](
        parts, order, starts, dkeys_TL, *sizes, **ADDED, WIDTH=next_power_of_2(width)
    )


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with the features of a row next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


_operator_backward = operator(
    "latent_sparse_attention_backward", _backward, fake=fake_like(0, 1, 2, 3)
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    y_TNR, log_sum_TN = output
    # Log-sums are for the backward pass: nobody else gets them.
    ctx.mark_non_differentiable(log_sum_TN)
    ctx.save_for_backward(*tensors, y_TNR, log_sum_TN)


def _gradients(ctx: Any, dy_TNR: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    *tensors, log_sum_TN = ctx.saved_tensors
    return *_operator_backward(*tensors, dy_TNR, log_sum_TN, ctx.scale), None, None


_operator = operator(
    "latent_sparse_attention", _forward, fake=_fake, keep=_keep, backward=_gradients
)


def latent_sparse_attention(
    q_TNR: torch.Tensor,
    q_TNP: torch.Tensor,
    latent_TR: torch.Tensor,
    k_TP: torch.Tensor,
    selected_TS: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
) -> torch.Tensor:
    """Same as the reference, [T, N, R]: scores and sums in fp32."""
    del segments
    return _operator(q_TNR, q_TNP, latent_TR, k_TP, selected_TS, scale)[0]
