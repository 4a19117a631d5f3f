"""causal_conv1d on Triton: a program takes some channels of some tokens.

Each finds the documents of its tokens in their borders. The backward pass recomputes sums before
the activation, also those of the next tokens, which are read from the caches.
"""

# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from penstock_kernels.causal_conv1d.autograd import differentiable
from penstock_kernels.launch_sizes import cdiv

TILE = {"ROWS": 16, "BLOCK": 128, "num_warps": 4}
"""Tokens and channels that a program takes at a time."""
MOST_PARTIALS = 128
"""Programs of a block of channels in the backward pass, each with a sum of weights' gradients."""


@triton.jit
def _documents(cu_seqlens_ptr, token, num_documents):
    """The document of each token, by bisection, its first token, and the one past its last."""
    low = tl.zeros_like(token)
    high = low + num_documents
    remaining = num_documents
    # As many steps for all tokens: the condition of a loop in Triton is a scalar.
    while remaining > 1:
        middle = (low + high) // 2
        is_later = tl.load(cu_seqlens_ptr + middle) <= token
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
        remaining = (remaining + 1) // 2
    return low, tl.load(cu_seqlens_ptr + low), tl.load(cu_seqlens_ptr + low + 1)


@triton.jit
def _inputs(x_ptr, initial_ptr, document, start, position, column, inside, C, WIDTH: tl.constexpr):
    """Inputs [rows, BLOCK] at positions in documents, also those before a document's first."""
    row = (start + position).to(tl.int64)
    x = tl.load(x_ptr + row * C + column, mask=inside & (position >= 0), other=0)
    x = x.to(tl.float32)
    if initial_ptr is not None:
        row = document.to(tl.int64) * (WIDTH - 1) + WIDTH - 1 + position
        is_before = inside & (position < 0) & (position > -WIDTH)
        x += tl.load(initial_ptr + row * C + column, mask=is_before, other=0).to(tl.float32)
    return x


@triton.jit
def _sums(
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    document,
    start,
    position,
    column,
    inside,
    C,
    WIDTH: tl.constexpr,
):
    """What the activation is applied to, [rows, BLOCK]."""
    acc = tl.zeros(inside.shape, tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column < C, other=0).to(tl.float32)
    for ago in tl.static_range(WIDTH):
        tap = tl.load(weight_ptr + column * WIDTH + WIDTH - 1 - ago, mask=column < C, other=0)
        acc += tap.to(tl.float32) * _inputs(
            x_ptr, initial_ptr, document, start, position - ago, column, inside, C, WIDTH
        )
    return acc


@triton.jit
def _slopes(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    document,
    start,
    position,
    column,
    inside,
    C,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradient of what the activation is applied to, 0 where not inside."""
    row = (start + position).to(tl.int64)
    dy = tl.load(dy_ptr + row * C + column, mask=inside, other=0).to(tl.float32)
    if SILU:
        x = _sums(
            x_ptr,
            weight_ptr,
            bias_ptr,
            initial_ptr,
            document,
            start,
            position,
            column,
            inside,
            C,
            WIDTH,
        )
        share = tl.sigmoid(x)
        # The derivative of x times its sigmoid.
        dy *= share * (1 + x * (1 - share))
    return dy


# Not specialized on whether they are 1 or divisible by 16: both vary from step to step.
@triton.jit(do_not_specialize=["T", "num_documents"])
def _forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    cu_seqlens_ptr,
    y_ptr,
    T,
    C,
    num_documents,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (token < T) & (column < C)
    document, start, _ = _documents(cu_seqlens_ptr, token, num_documents)
    y = _sums(
        x_ptr,
        weight_ptr,
        bias_ptr,
        initial_ptr,
        document,
        start,
        token - start,
        column,
        inside,
        C,
        WIDTH,
    )
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(y_ptr + token.to(tl.int64) * C + column, y, mask=inside)


@triton.jit(do_not_specialize=["T", "num_documents", "rows_each"])
def _backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    dfinal_ptr,
    cu_seqlens_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    T,
    C,
    num_documents,
    rows_each,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx, and parts of the gradients of taps, [parts, WIDTH, C], and of the bias, [parts, C]."""
    part = tl.program_id(0)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    # 4, for WIDTH is at most that, and Triton's ranges are powers of two.
    tap = tl.arange(0, 4)[:, None]
    dweight = tl.zeros([4, BLOCK], tl.float32)
    dbias = tl.zeros([1, BLOCK], tl.float32)
    last = tl.minimum((part + 1) * rows_each, T)
    for first in range(part * rows_each, last, ROWS):
        token = (first + tl.arange(0, ROWS))[:, None]
        inside = (token < last) & (column < C)
        document, start, end = _documents(cu_seqlens_ptr, token, num_documents)
        dx = tl.zeros([ROWS, BLOCK], tl.float32)
        for ago in tl.static_range(WIDTH):
            position = token - start + ago
            slopes = _slopes(
                dy_ptr,
                x_ptr,
                weight_ptr,
                bias_ptr,
                initial_ptr,
                document,
                start,
                position,
                column,
                inside & (position < end - start),
                C,
                SILU,
                WIDTH,
            )
            weight_ptrs = weight_ptr + column * WIDTH + WIDTH - 1 - ago
            dx += slopes * tl.load(weight_ptrs, mask=column < C, other=0).to(tl.float32)
            # Here the slopes are those of this tile's own tokens: each is counted once.
            if ago == 0:
                dbias += tl.sum(slopes, axis=0)[None, :]
                for earlier in tl.static_range(WIDTH):
                    x = _inputs(
                        x_ptr,
                        initial_ptr,
                        document,
                        start,
                        position - earlier,
                        column,
                        inside,
                        C,
                        WIDTH,
                    )
                    summed = tl.sum(slopes * x, axis=0)[None, :]
                    # Registers have no index: the sum is added to its row, and 0 to the others.
                    dweight += tl.where(tap == WIDTH - 1 - earlier, summed, 0.0)
        if dfinal_ptr is not None:
            row = document.to(tl.int64) * (WIDTH - 1) + WIDTH - 1 + token - end
            is_kept = inside & (token >= end - WIDTH + 1)
            dx += tl.load(dfinal_ptr + row * C + column, mask=is_kept, other=0).to(tl.float32)
        tl.store(dx_ptr + token.to(tl.int64) * C + column, dx, mask=inside)
    tl.store(
        dweight_ptr + (part * WIDTH + tap).to(tl.int64) * C + column,
        dweight,
        mask=(tap < WIDTH) & (column < C),
    )
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part.to(tl.int64) * C + column, dbias, mask=column < C)


@triton.jit
def _states(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    dfinal_ptr,
    cu_seqlens_ptr,
    states_ptr,
    C,
    BACKWARD: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Final states, or BACKWARD the gradients of the initial ones, [B, WIDTH - 1, C].

    Both are WIDTH - 1 tokens of a document, its last ones or those before its first.
    """
    document = tl.program_id(0)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = tl.arange(0, 4)[:, None]
    inside = (row < WIDTH - 1) & (column < C)
    start = tl.load(cu_seqlens_ptr + document)
    length = tl.load(cu_seqlens_ptr + document + 1) - start
    of = document.to(tl.int64) * (WIDTH - 1)
    if BACKWARD:
        state = tl.zeros([4, BLOCK], tl.float32)
        for ago in tl.static_range(1, WIDTH):
            position = row - (WIDTH - 1) + ago
            slopes = _slopes(
                dy_ptr,
                x_ptr,
                weight_ptr,
                bias_ptr,
                initial_ptr,
                document,
                start,
                position,
                column,
                inside & (position >= 0) & (position < length),
                C,
                SILU,
                WIDTH,
            )
            weight_ptrs = weight_ptr + column * WIDTH + WIDTH - 1 - ago
            state += slopes * tl.load(weight_ptrs, mask=column < C, other=0).to(tl.float32)
        if dfinal_ptr is not None:
            # Of states that a short document keeps.
            final_row = row - length
            final_ptrs = dfinal_ptr + (of + final_row) * C + column
            state += tl.load(final_ptrs, mask=inside & (final_row >= 0), other=0).to(tl.float32)
    else:
        position = length - (WIDTH - 1) + row
        state = _inputs(x_ptr, initial_ptr, document, start, position, column, inside, C, WIDTH)
    tl.store(states_ptr + (of + row) * C + column, state, mask=inside)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    initial = None if initial is None else initial.contiguous()
    (T, C), width, documents = x.shape, weight.shape[1], len(cu_seqlens) - 1
    y, final = x.new_empty(x.shape), x.new_empty(documents, width - 1, C)
    blocks, kind = cdiv(C, TILE["BLOCK"]), {"SILU": silu, "WIDTH": width}
    inputs = x, weight, bias, initial
    _forward[(cdiv(T, TILE["ROWS"]), blocks)](
        *inputs, cu_seqlens, y, T, C, documents, **kind, **TILE
    )
    _states[(documents, blocks)](
        *(None, *inputs, None, cu_seqlens, final, C), BACKWARD=False, **kind, BLOCK=TILE["BLOCK"]
    )
    return y, final


def _gradients(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight, bias and the initial states; those of absent inputs are empty."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dfinal, initial = (None if s is None else s.contiguous() for s in (dfinal, initial))
    (T, C), width, documents = x.shape, weight.shape[1], len(cu_seqlens) - 1
    # Each of `parts` programs sums the gradients of weight and bias over `rows_each` tokens; the
    # sums are added below, in an order that does not vary as that of atomic additions does.
    rows_each = cdiv(cdiv(T, MOST_PARTIALS), TILE["ROWS"]) * TILE["ROWS"]
    parts, blocks = cdiv(T, rows_each), cdiv(C, TILE["BLOCK"])
    dx = x.new_empty(x.shape)
    dweight = x.new_empty(parts, width, C, dtype=torch.float32)
    dbias = None if bias is None else x.new_empty(parts, C, dtype=torch.float32)
    kind = {"SILU": silu, "WIDTH": width}
    inputs = dy, x, weight, bias, initial, dfinal, cu_seqlens
    _backward[(parts, blocks)](
        *inputs, dx, dweight, dbias, T, C, documents, rows_each, **kind, **TILE
    )
    # Empty, not None: a custom operator returns tensors alone.
    dinitial = x.new_empty(0)
    if initial is not None:
        dinitial = initial.new_empty(initial.shape)
        _states[(documents, blocks)](
            *inputs, dinitial, C, BACKWARD=True, **kind, BLOCK=TILE["BLOCK"]
        )
    return (
        dx,
        dweight.sum(0).t().to(weight.dtype).contiguous(),
        x.new_empty(0) if bias is None or dbias is None else dbias.sum(0).to(bias.dtype),
        dinitial,
    )


causal_conv1d = differentiable("causal_conv1d", _run, _gradients)
"""Same as the reference."""
