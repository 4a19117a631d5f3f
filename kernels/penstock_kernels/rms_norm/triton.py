"""rms_norm on Triton: some rows a program; backward sums the weight's gradient in two steps.

With n = x / rms(x), g = dy * weight:  dx = (g - n * mean(g * n)) / rms(x),  dweight = sum_T dy * n.
"""

# pyright: reportArgumentType=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import keep_inputs, operator
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.spans import Spans, to_spans

MOST_PARTIALS = 512
"""Programs in the backward pass, each summing the weight's gradient over its share of the rows.
Partial sums whose number is a device's, added in one order, keep the gradient the same from run to
run. This many where it is no GPU."""

# Warps that a multiprocessor holds at once, by their registers. As many programs start as all of
# them hold: none waits for the end of another, and they end together.
RESIDENT = 16

PARTIALS = {"PARTS": 32, "COLUMNS": 32}
"""Partial sums and columns that a program adds at a time."""

TILE = 2048
"""Elements that a program processes at a time for narrow rows, such as heads."""


@triton.jit
def _starts(row, D, SPAN: tl.constexpr, SPAN_STRIDE: tl.constexpr):
    """Where rows begin: SPAN of them side by side, spans SPAN_STRIDE apart; 0: all are."""
    if SPAN == 0:
        return row.to(tl.int64) * D
    else:
        # Rows are counted in 32 bits: a division by a constant is then few instructions.
        return (row // SPAN).to(tl.int64) * SPAN_STRIDE + (row % SPAN) * D


@triton.jit
def _factor(weight_ptr, offs, D, dtype: tl.constexpr, PLUS_ONE: tl.constexpr):
    """The factor of normalized features in fp32: the weight rounded to `dtype`, or 1 plus it as it
    is."""
    weight = tl.load(weight_ptr + offs, mask=offs < D, other=0)
    if PLUS_ONE:
        return weight.to(tl.float32) + 1
    else:
        return weight.to(dtype).to(tl.float32)


# Triton compiles another program for integers that are 1 or divisible by 16: num_rows varies.
@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_ptr,
    stream_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    scale_ptr,
    num_rows,
    D,
    eps,
    SPAN: tl.constexpr,
    SPAN_STRIDE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (offs < D)
    row_offs = row.to(tl.int64)[:, None] * D + offs
    start = _starts(row, D, SPAN, SPAN_STRIDE)
    x = tl.load(x_ptr + start[:, None] + offs, mask=inside, other=0).to(tl.float32)
    if stream_ptr is not None:
        x += tl.load(stream_ptr + row_offs, mask=inside, other=0).to(tl.float32)
        # The rounded sum is normalized.
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row_offs, total, mask=inside)
        x = total.to(tl.float32)
    mean = tl.sum(x * x, axis=1) / D + eps
    # Rows past the last are zeros: with an eps of 0 they would be divided by.
    scale = 1 / tl.sqrt(tl.where(row < num_rows, mean, 1.0))
    tl.store(scale_ptr + row, scale, mask=row < num_rows)
    normed = x * scale[:, None]
    if not PLUS_ONE:
        # Rounded to y's dtype before the weight, as the reference does.
        normed = normed.to(y_ptr.dtype.element_ty).to(tl.float32)
    factor = _factor(weight_ptr, offs, D, y_ptr.dtype.element_ty, PLUS_ONE)
    tl.store(y_ptr + row_offs, normed * factor, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _backward(
    x_ptr,
    weight_ptr,
    dy_ptr,
    dsum_ptr,
    scale_ptr,
    dx_ptr,
    dweight_ptr,
    num_rows,
    rows_each,
    D,
    SPAN: tl.constexpr,
    SPAN_STRIDE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    offs = tl.arange(0, BLOCK)[None, :]
    weight = _factor(weight_ptr, offs, D, dx_ptr.dtype.element_ty, PLUS_ONE)
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    end = tl.minimum((part + 1) * rows_each, num_rows)
    for first in range(part * rows_each, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (offs < D)
        row_offs = row.to(tl.int64)[:, None] * D + offs
        start = _starts(row, D, SPAN, SPAN_STRIDE)
        x = tl.load(x_ptr + start[:, None] + offs, mask=inside, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row_offs, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < end, other=0)[:, None]
        normed = x * scale
        weighted = dy * weight
        mean = tl.sum(weighted * normed, axis=1)[:, None] / D
        dx = (weighted - normed * mean) * scale
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row_offs, mask=inside, other=0).to(tl.float32)
        tl.store(dx_ptr + row_offs, dx, mask=inside)
        # Rows are reduced once, after the loop: a reduction in it would cross threads each time.
        dweight += dy * normed
    if dweight_ptr is not None:
        tl.store(
            dweight_ptr + part.to(tl.int64) * D + tl.arange(0, BLOCK),
            tl.sum(dweight, axis=0),
            mask=tl.arange(0, BLOCK) < D,
        )


@triton.jit(do_not_specialize=["parts"])
def _add_partials(partial_ptr, sum_ptr, parts, D, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of partial sums [parts, D], in the dtype of the weight."""
    offs = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (offs < D)[None, :]
        acc += tl.load(partial_ptr + part[:, None] * D + offs[None, :], mask=inside, other=0)
    tl.store(sum_ptr + offs, tl.sum(acc, axis=0), mask=offs < D)


def tile(width: int) -> dict[str, int]:
    """Rows and columns that a program takes at a time, and its warps."""
    block = next_power_of_2(width)
    rows = max(1, TILE // block)
    size = rows * block
    warps = 4 if size <= 2048 else 8 if size <= 4096 else 16 if size <= 16384 else 32
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def _normalized(
    x: torch.Tensor, stream: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum (empty without a residual stream), its norm, and the factor of each row."""
    D = x.shape[-1]
    num_rows = x.numel() // D
    y = x.new_empty(x.shape)
    # An operator's schema has no optional results: an empty tensor stands for none.
    total = x.new_empty(x.shape if stream is not None else (0,))
    scale = x.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        spans, launch = to_spans(x), tile(D)
        streams = (None, None) if stream is None else (stream.contiguous(), total)
        _forward[(cdiv(num_rows, launch["ROWS"]),)](
            *(spans.tensor, streams[0], weight.contiguous(), streams[1], y, scale),
            *(num_rows, D, eps),
            PLUS_ONE=plus_one,
            **_constants(spans, D),
            **launch,
        )
    return total, y, scale


def _gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    scale: torch.Tensor,
    plus_one: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x, plus `dsum`, and that of the weight, empty if it is not needed."""
    D = x.shape[-1]
    num_rows = x.numel() // D
    dx = x.new_empty(x.shape)
    if not num_rows:
        return dx, weight.new_zeros(D if wants_weight else 0)
    spans, launch = to_spans(x), tile(D)
    # The number of partial sums depends on the device alone, so that sums are the same from run to
    # run.
    most = MOST_PARTIALS
    if x.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
        most = multiprocessors * max(1, RESIDENT // launch["num_warps"])
    # Whole tiles: only the last tile of all rows is masked.
    rows_each = cdiv(cdiv(num_rows, most), launch["ROWS"]) * launch["ROWS"]
    parts = cdiv(num_rows, rows_each)
    partial = x.new_empty(parts, D, dtype=torch.float32) if wants_weight else None
    dsum = None if dsum is None else dsum.contiguous()
    _backward[(parts,)](
        *(spans.tensor, weight.contiguous(), dy.contiguous(), dsum, scale, dx, partial),
        *(num_rows, rows_each, D),
        PLUS_ONE=plus_one,
        **_constants(spans, D),
        **launch,
    )
    if partial is None:
        return dx, weight.new_empty(0)
    dweight = weight.new_empty(D)
    _add_partials[(cdiv(D, PARTIALS["COLUMNS"]),)](partial, dweight, parts, D, **PARTIALS)
    return dx, dweight


def _constants(spans: Spans, D: int) -> dict[str, int]:
    # A model has few layouts of rows, so a program for each is worth it.
    return {"SPAN": spans.length // D if spans.stride else 0, "SPAN_STRIDE": spans.stride}


def _gradients_fake(
    x: torch.Tensor, weight: torch.Tensor, *further: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    wants_weight = further[-1]
    return x.new_empty(x.shape), weight.new_empty(weight.shape if wants_weight else (0,))


_gradients_of = operator("rms_norm_gradients", _gradients, fake=_gradients_fake)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _normalized(x, None, weight, eps, plus_one)[1:]


def _norm_fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


def _back_norm(ctx: Any, dy: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    x, weight, scale = ctx.saved_tensors
    _, plus_one = ctx.options
    needs_grad = ctx.needs_input_grad[1]
    dx, dweight = _gradients_of(x, weight, dy, None, scale, plus_one, needs_grad)
    return dx, dweight if needs_grad else None, None, None


# Nobody has a gradient of `scale`, and zeros of it would be a launch.
_norm_of = operator(
    "rms_norm",
    _norm,
    fake=_norm_fake,
    keep=keep_inputs(2, 1, materialize_grads=False),
    backward=_back_norm,
)


def _add_norm(
    x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _normalized(x, stream, weight, eps, plus_one)


def _add_norm_fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), *_norm_fake(x)


def _back_add_norm(
    ctx: Any, dsum: torch.Tensor | None, dy: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    weight, total, scale = ctx.saved_tensors
    _, plus_one = ctx.options
    # The norm was not used, only the sum.
    if dy is None:
        return dsum, dsum, None, None, None
    needs_grad = ctx.needs_input_grad[2]
    dx, dweight = _gradients_of(total, weight, dy, dsum, scale, plus_one, needs_grad)
    return dx, dx, dweight if needs_grad else None, None, None


_add_norm_of = operator(
    "add_rms_norm",
    _add_norm,
    fake=_add_norm_fake,
    keep=keep_inputs(3, 0, 2, first=2, materialize_grads=False),
    backward=_back_add_norm,
)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, plus_one: bool = False
) -> torch.Tensor:
    """Same as the reference, with a fused backward."""
    y_TD, _ = _norm_of(x_TD, weight_D, eps, plus_one)
    return y_TD


def add_rms_norm(
    x_TD: torch.Tensor,
    stream_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference: each input is read once, and each result written once."""
    sum_TD, y_TD, _ = _add_norm_of(x_TD, stream_TD, weight_D, eps, plus_one)
    return sum_TD, y_TD
