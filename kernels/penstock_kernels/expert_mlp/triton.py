"""expert_mlp on Triton: no row is copied, and none of the experts' outputs is saved.

The weight of a row multiplies its output y = W h, so that the gradient of the weight, dy . y, is
that of what the backward pass computes anyway, (W^T dy) . h; neither y nor the weighted dy is read
again (Guo et al. 2025, "SonicMoE"). Of a row, only the gate and up features are saved.

T tokens, R rows, D model width, F features, E experts, K experts per token.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import needed, operator
from penstock_kernels.expert_mlp.reference import Gate
from penstock_kernels.group_gemm import triton as products
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.permute.reference import Order
from penstock_kernels.permute.triton import add_rows

WIDEST = 1024
"""Features that a program holds at a time."""
SUMMED = {"ROWS": 32, "COLUMNS": 128}


@triton.jit
def _products(a_ptr, b_ptr, length, BLOCK: tl.constexpr):
    """Products of two vectors, of which each lane adds some."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, length, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + offs, mask=offs < length, other=0).to(tl.float32)
        total += a * tl.load(b_ptr + offs, mask=offs < length, other=0).to(tl.float32)
    return total


@triton.jit
def _gate_gradients(
    both_ptr,
    dinner_ptr,
    weights_ptr,
    copies_ptr,
    dy_ptr,
    bias_ptr,
    ends_ptr,
    dboth_ptr,
    inner_ptr,
    dweights_ptr,
    E,
    D,
    F,
    per_token,
    alpha,
    limit,
    GATE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a row: its gate and up features' gradients and its inner features, both times its weight,
    and its weight's gradient. `dinner` is without the weight; the bias is that of outputs."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(copies_ptr + row)
    width = tl.where(copy >= 0, F, 0)
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + copy, mask=copy >= 0, other=0).to(tl.float32)
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for feature in range(0, width, BLOCK):
        offs = feature + tl.arange(0, BLOCK)
        inside = offs < width
        if GATE == "clamped":
            pairs = 2 * feature + tl.arange(0, 2 * BLOCK)
            both = tl.load(both_ptr + row * 2 * F + pairs, mask=pairs < 2 * width, other=0)
            gate, up = tl.split(both.to(tl.float32).reshape(BLOCK, 2))
        else:
            gate_at = both_ptr + row * 2 * F + offs
            gate = tl.load(gate_at, mask=inside, other=0).to(tl.float32)
            up = tl.load(gate_at + F, mask=inside, other=0).to(tl.float32)
        dinner = tl.load(dinner_ptr + row * F + offs, mask=inside, other=0).to(tl.float32)
        inner = products.gated_product(gate, up, alpha, limit, GATE)
        # As the forward pass rounds it for the second product.
        inner = inner.to(inner_ptr.dtype.element_ty).to(tl.float32)
        product += inner * dinner
        dinner *= weight
        tl.store(inner_ptr + row * F + offs, inner * weight, mask=inside)
        if GATE == "clamped":
            # At the limits gradients pass, as in torch.clamp.
            gate_passes = gate <= limit
            up_passes = (up >= -limit) & (up <= limit)
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1
            share = tl.sigmoid(alpha * gate)
            dgate = dinner * up * share * (1 + alpha * gate * (1 - share))
            dgate = tl.where(gate_passes, dgate, 0)
            dup = tl.where(up_passes, dinner * gate * share, 0)
            dboth = tl.interleave(dgate, dup)
            tl.store(dboth_ptr + row * 2 * F + pairs, dboth, mask=pairs < 2 * width)
        else:
            share = tl.sigmoid(gate)
            # d (g s(g)) / dg = s + g s (1 - s).
            dgate = dinner * up * share * (1 + gate * (1 - share))
            dgate_at = dboth_ptr + row * 2 * F + offs
            tl.store(dgate_at, dgate, mask=inside)
            tl.store(dgate_at + F, dinner * gate * share, mask=inside)
    if dweights_ptr is not None:
        if bias_ptr is not None:
            experts = tl.arange(0, EXPERTS)
            ends = tl.load(ends_ptr + experts, mask=experts < E, other=2147483647)
            expert = tl.sum((ends <= row).to(tl.int64), axis=0)
            length = tl.where(copy >= 0, D, 0)
            dy_row, bias_row = dy_ptr + copy // per_token * D, bias_ptr + expert * D
            product += _products(dy_row, bias_row, length, BLOCK)
        tl.store(dweights_ptr + copy, tl.sum(product, axis=0), mask=copy >= 0)


@triton.jit
def _sum_groups(
    x_ptr,
    weights_ptr,
    copies_ptr,
    ends_ptr,
    y_ptr,
    N,
    per_token,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of an expert's rows, in fp32 and in their order. With copies, row r of x is
    `copies[r] // per_token`, times its weight."""
    expert = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(start, end, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        is_own = rows < end
        x_rows = rows
        if copies_ptr is not None:
            copies = tl.load(copies_ptr + rows, mask=is_own, other=0)
            x_rows = copies // per_token
        inside = is_own[:, None] & (columns < N)[None, :]
        x = tl.load(x_ptr + x_rows[:, None] * N + columns[None, :], mask=inside, other=0)
        x = x.to(tl.float32)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + copies, mask=is_own, other=0).to(tl.float32)[:, None]
        total += x
    y_at = y_ptr + expert.to(tl.int64) * N + columns
    tl.store(y_at, tl.sum(total, axis=0), mask=columns < N)


def _summed(
    x_RN: torch.Tensor,
    ends_E: torch.Tensor,
    weights: torch.Tensor | None = None,
    copies: torch.Tensor | None = None,
    per_token: int = 1,
) -> torch.Tensor:
    E, N = ends_E.shape[0], x_RN.shape[1]
    y_EN = x_RN.new_empty(E, N)
    tensors = x_RN, weights, copies, ends_E, y_EN
    _sum_groups[(E, cdiv(N, SUMMED["COLUMNS"]))](*tensors, N, per_token, **SUMMED)
    return y_EN


def _mixed(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    copy_of_row: torch.Tensor,
    row_of_copy: torch.Tensor,
    counts: torch.Tensor,
    gate: str,
    alpha: float,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_token = row_of_copy.shape[1]
    bounds = products.plan(counts, copy_of_row.shape[0], x, past=False)
    gathered = {"copies": copy_of_row, "per_token": per_token}
    activation = {"gate": gate, "alpha": alpha, "limit": limit}
    both, inner = products.multiply_rows(
        x, gate_up, bounds, bias_GN=gate_up_bias, **gathered, **activation
    )
    y_RD, _ = products.multiply_rows(inner, down, bounds, bias_GN=down_bias)
    return add_rows(y_RD, weights, row_of_copy), both, bounds.bounds


def _mixed_fake(
    x: torch.Tensor, _: Any, gate_up: torch.Tensor, *further: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (E, N, _), copy_of_row = gate_up.shape, further[3]
    bounds = x.new_empty(3, E + 1, dtype=torch.int32)
    return x.new_empty(x.shape), x.new_empty(copy_of_row.shape[0], N), bounds


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    copy_of_row: torch.Tensor,
    row_of_copy: torch.Tensor,
    both: torch.Tensor,
    bounds: torch.Tensor,
    gate: str,
    alpha: float,
    limit: float,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Of x, weights, both matrices and both biases; empty where none is needed."""
    for_x, for_weights, for_gate_up, for_down, *for_biases = needs
    dy, x = dy.contiguous(), x.contiguous()
    weights = None if weights is None else weights.contiguous()
    (E, D, F), R, K = down.shape, copy_of_row.shape[0], row_of_copy.shape[1]
    plan = products.Bounds.of_tensor(bounds, R, x)
    gathered = {"copies": copy_of_row, "per_token": K}
    dinner, _ = products.multiply_rows(dy, down.mT, plan, **gathered)
    dboth, inner = both.new_empty(both.shape), dinner.new_empty(dinner.shape)
    # Zeros: a copy without an expert has no row, and no program writes its weight's gradient.
    dweights = None if weights is None or not for_weights else torch.zeros_like(weights)
    if R:
        # Blocks of one size for features and outputs.
        block = min(next_power_of_2(F), WIDEST)
        _gate_gradients[(R,)](
            *(both, dinner, weights, copy_of_row, dy, down_bias, plan.ends_G),
            *(dboth, inner, dweights, E, D, F, K, alpha, limit),
            GATE=gate,
            EXPERTS=next_power_of_2(E),
            BLOCK=block,
        )
    # What is as large as all rows ends as soon as it is used.
    del dinner
    gradients = [x.new_empty(0) for _ in needs]
    if for_x:
        drows = products.multiply_rows(dboth, gate_up.mT, plan)[0]
        gradients[0] = add_rows(drows, None, row_of_copy)
        del drows
    if dweights is not None:
        gradients[1] = dweights
    if for_down:
        gradients[3] = _matrix_gradient(dy, inner, "a", down, plan, copy_of_row, K)
    del inner
    if for_gate_up:
        gradients[2] = _matrix_gradient(dboth, x, "b", gate_up, plan, copy_of_row, K)
    if for_biases[0]:
        gradients[4] = _summed(dboth, plan.ends_G)
    if for_biases[1]:
        gradients[5] = _summed(dy, plan.ends_G, weights, copy_of_row, K)
    return gradients


def _is_transposed(weight: torch.Tensor) -> bool:
    return weight.stride(-1) != 1 and weight.stride(-2) == 1


def _matrix_gradient(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    copied: Literal["a", "b"],
    weight: torch.Tensor,
    plan: products.Bounds,
    copies: torch.Tensor,
    per_token: int,
) -> torch.Tensor:
    # In the weight's own memory layout, so that accumulating into `grad` needs no copy.
    options = {"num_rows": plan.num_rows, "copies": copies, "per_token": per_token}
    if _is_transposed(weight):
        transposed = "a" if copied == "b" else "b"
        return products.multiply_groups(inputs, outputs, plan.ends_G, copied=transposed, **options)
    return products.multiply_groups(outputs, inputs, plan.ends_G, copied=copied, **options)


def _gradients_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *further: Any,
) -> list[torch.Tensor]:
    (E, D, F), needs = down.shape, further[-1]
    matrices = [weight.mT if _is_transposed(weight) else weight for weight in (gate_up, down)]
    shapes = [x.shape, x.shape if weights is None else weights.shape]
    shapes += [*(matrix.shape for matrix in matrices), (E, 2 * F), (E, D)]
    dtypes = [x.dtype, x.dtype if weights is None else weights.dtype, *[x.dtype] * 4]
    return [
        dy.new_empty(shape if is_needed else 0, dtype=dtype)
        for shape, dtype, is_needed in zip(shapes, dtypes, needs, strict=True)
    ]


_gradients_of = operator("expert_mlp_gradients", _gradients, fake=_gradients_fake)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[9:]
    _, both, bounds = output
    ctx.save_for_backward(*inputs[:8], both, bounds)


def _back(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 12
    needs = [*ctx.needs_input_grad[:6]]
    x, weights, gate_up, down, _, *further = ctx.saved_tensors
    gradients = _gradients_of(dy, x, weights, gate_up, down, *further, *ctx.options, needs)
    for number, weight in ((2, gate_up), (3, down)):
        # An operator returns no views: gradients of transposed matrices are transposed here.
        if needs[number] and _is_transposed(weight):
            gradients[number] = gradients[number].mT
    return needed(ctx, gradients)


_expert_mlp_of = operator("expert_mlp", _mixed, fake=_mixed_fake, keep=_keep, backward=_back)


def expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    order: Order,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    gate: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same as the reference."""
    matrices = gate_up_E2FD, down_EDF, gate_up_bias, down_bias
    numbers = order.copy_of_row, order.row_of_copy, order.counts
    options = gate.name, gate.alpha, gate.limit
    return _expert_mlp_of(x_TD, weights_TK, *matrices, *numbers, *options)[0]
