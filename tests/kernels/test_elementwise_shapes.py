"""Elementwise operations, references and Triton, against their definitions in fp64 at random
shapes; and as operators that PyTorch's compiler passes through."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.library import opcheck

from penstock_kernels.clamped_swiglu import clamped_gate
from penstock_kernels.glu import geglu, geglu_tanh, packed_swiglu, swiglu
from penstock_kernels.op import Op
from penstock_kernels.rms_norm import add_rms_norm, rms_norm
from penstock_kernels.rms_norm import triton as norms
from penstock_kernels.rope import rope
from tests.kernels.where import DEVICE, needs_triton

# Of numbers about as large as 1. A reference rounds up to four times; interpreted, a kernel cuts
# off once or twice where a GPU rounds.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = (1, 2, 3, 7, 16, 17, 31, 64, 97, 128, 129, 251)
EPS = 1e-6
ALPHA, LIMIT = 1.702, 0.75


@dataclass(frozen=True)
class Case:
    """An operation, its definition, and inputs for sizes."""

    op: Op
    exact: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    shapes: Callable[[random.Random], Sequence[tuple[int, ...]]]
    """Of what learns."""
    more: tuple[object, ...] = ()
    """What else it is called with."""


def exact_norm(x, weight, eps, plus_one):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + plus_one)


def exact_sum_and_norm(x, stream, weight, eps, plus_one):
    return x + stream, exact_norm(x + stream, weight, eps, plus_one)


def exact_swiglu(gate, up):
    return gate / (1 + (-gate).exp()) * up


def exact_geglu(gate, up):
    return gate * torch.special.ndtr(gate) * up


def exact_geglu_tanh(gate, up):
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + inner.tanh()) * up


def exact_clamped_gate(both, alpha, limit):
    gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate / (1 + (-alpha * gate).exp())


def exact_turn(x, cos, sin, pairs):
    turning, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if pairs == "halves":
        parts, angles = turning.unflatten(-1, (2, -1)).unbind(-2), cos.shape[-1] // 2
        factor = torch.complex(cos, sin)[:, None, :angles]
    else:
        parts = turning.unflatten(-1, (-1, 2)).unbind(-1)
        factor = torch.complex(cos, sin)[:, None, ::2]
    turned = torch.complex(*(part.contiguous() for part in parts)) * factor
    parts = torch.stack((turned.real, turned.imag), dim=-2 if pairs == "halves" else -1)
    return torch.cat((parts.flatten(-2), still), dim=-1)


def exact_rope(q, k, cos, sin, pairs):
    return exact_turn(q, cos, sin, pairs), exact_turn(k, cos, sin, pairs)


def rows_of_heads(draw):
    """Rows, or heads of rows; now and then none, or many."""
    tokens = draw.choice((0, 1, 2, 3, 5, 7, 97))
    width = draw.choice(SIZES[:5] if tokens > 7 else SIZES)
    return (tokens, draw.choice((1, 2, 5)), width) if draw.random() < 0.3 else (tokens, width)


def norm_shapes(draw):
    shape = rows_of_heads(draw)
    return shape, shape[-1:]


def sum_shapes(draw):
    shape = rows_of_heads(draw)
    return shape, shape, shape[-1:]


def gate_shapes(draw):
    return (rows_of_heads(draw),) * 2


def both_shapes(draw):
    *rows, features = rows_of_heads(draw)
    return ((*rows, 2 * features),)


def head_shapes(draw):
    tokens, width = draw.choice((0, 1, 2, 3, 5)), 2 * draw.choice((1, 2, 3, 5, 8, 33))
    return (tokens, draw.choice((1, 3, 4, 9)), width), (tokens, draw.choice((1, 2)), width)


CASES = {
    "rms_norm": Case(rms_norm, exact_norm, norm_shapes, (EPS, False)),
    "rms_norm, 1 + weight": Case(rms_norm, exact_norm, norm_shapes, (EPS, True)),
    "add_rms_norm": Case(add_rms_norm, exact_sum_and_norm, sum_shapes, (EPS, False)),
    "add_rms_norm, 1 + weight": Case(add_rms_norm, exact_sum_and_norm, sum_shapes, (EPS, True)),
    "swiglu": Case(swiglu, exact_swiglu, gate_shapes),
    "packed_swiglu": Case(
        packed_swiglu, lambda both: exact_swiglu(*both.chunk(2, dim=-1)), both_shapes
    ),
    "geglu": Case(geglu, exact_geglu, gate_shapes),
    "geglu_tanh": Case(geglu_tanh, exact_geglu_tanh, gate_shapes),
    "clamped_gate": Case(clamped_gate, exact_clamped_gate, both_shapes, (ALPHA, LIMIT)),
    "rope, halves": Case(rope, exact_rope, head_shapes, ("halves",)),
    "rope, neighbours": Case(rope, exact_rope, head_shapes, ("neighbours",)),
}


def drawn(shape, dtype, draw, generator):
    """Numbers from 0.25 on, of either sign; in memory of their own, or in wider rows."""
    apart = math.prod(shape[:-1]) < 11 and draw.random() < 0.5
    wide = (*shape[:-1], shape[-1] * 2 + 1) if apart else shape
    noise = torch.randn(wide, generator=generator)
    return ((noise.abs() + 0.25) * noise.sign()).to(DEVICE, dtype)[..., : shape[-1]]


def angles(shape, dtype, pairs, draw, generator):
    """Cosines and sines for a share of the features of heads."""
    tokens, _, width = shape
    turning = draw.randrange(2, width + 1, 2)
    angle = torch.rand(tokens, turning // 2, generator=generator, dtype=torch.float64) * 7
    both = angle.repeat(1, 2) if pairs == "halves" else angle.repeat_interleave(2, dim=-1)
    return both.cos().to(DEVICE, dtype), both.sin().to(DEVICE, dtype)


def results(run, inputs, fixed, slopes=None):
    """Outputs, and gradients for slopes of them, which are drawn if not given."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    found = run(*inputs, *fixed)
    found = found if isinstance(found, tuple) else (found,)
    if slopes is None:
        generator = torch.Generator().manual_seed(1)
        slopes = [torch.randn(y.shape, generator=generator).to(DEVICE, y.dtype) for y in found]
    exact = [slope.to(y.dtype) for slope, y in zip(slopes, found, strict=True)]
    return (*found, *torch.autograd.grad(found, inputs, exact)), slopes


def compare(case, draw, generator, backend):
    dtype = draw.choice(list(TOLERANCE))
    shapes = case.shapes(draw)
    inputs = [drawn(shape, dtype, draw, generator) for shape in shapes]
    if case.op is rms_norm or case.op is add_rms_norm:
        # Weights learn in fp32 beside a stream in bf16.
        inputs[-1] = inputs[-1].to(draw.choice((dtype, torch.float32)))
    fixed = case.more
    if case.op is rope:
        fixed = (*angles(shapes[0], dtype, fixed[0], draw, generator), *fixed)
    got, slopes = results(case.op.backend(backend), inputs, fixed)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in fixed]
    want, _ = results(case.exact, [x.double() for x in inputs], wide, slopes)
    # A gradient of a weight is a sum over rows, of which each was rounded.
    rows = max(1, math.prod(shapes[0][:-1]))
    for at, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        expected = dtype if at < len(slopes) else inputs[at - len(slopes)].dtype
        assert mine.dtype == expected
        assert mine.shape == theirs.shape
        summed = theirs.ndim < len(shapes[0])
        limit = TOLERANCE[dtype] * (1 + theirs.abs()) * (4 * rows**0.5 if summed else 4)
        error = (mine.double() - theirs).abs()
        assert bool((error <= limit).all()), (shapes, dtype, error.max())


def judged():
    """Each implementation and numbers of shapes; interpreted few, unless there is time."""
    for name, case in CASES.items():
        # One kernel has a hundred among its kinds.
        each = 3 if name.startswith(("ge", "swi")) else 2 if name.startswith("rope") else 1
        for backend in case.op.backends[1:]:
            if backend != "triton":
                yield name, backend, range(0, 102, each)
            else:
                yield pytest.param(name, backend, range(0, 6, each), marks=needs_triton)
                marks = [needs_triton, pytest.mark.exhaustive]
                yield pytest.param(name, backend, range(6, 102, each), marks=marks)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("name", "backend", "numbers"), [*judged()])
def test_values_and_gradients_are_exact_ones_rounded_at_random_shapes(
    name, backend, numbers, monkeypatch
):
    if backend == "triton":
        # So few that rows are not as many for each, and each adds up several tiles.
        monkeypatch.setattr(norms, "MOST_PARTIALS", 3)
        monkeypatch.setattr(norms, "TILE", 256)
    for number in numbers:
        draw = random.Random(f"{name} {number}")
        generator = torch.Generator().manual_seed(number)
        compare(CASES[name], draw, generator, backend)


def randoms(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


@needs_triton
@pytest.mark.parametrize(
    ("operator", "shapes", "learning", "more"),
    [
        ("rms_norm", ((3, 5), (5,)), 2, (EPS, True)),
        ("add_rms_norm", ((3, 5), (3, 5), (5,)), 3, (EPS, True)),
        ("glu", ((3, 5), (3, 5)), 2, ("gelu_tanh",)),
        ("clamped_gate", ((3, 6),), 1, (ALPHA, LIMIT)),
        ("rope", ((3, 2, 8), (3, 1, 8), (3, 6), (3, 6)), 2, ("neighbours", False)),
    ],
)
def test_pytorch_finds_no_fault_with_an_operator(operator, shapes, learning, more):
    tensors = randoms(*shapes)
    for tensor in tensors[:learning]:
        tensor.requires_grad_()
    opcheck(getattr(torch.ops.penstock, operator).default, (*tensors, *more))


@needs_triton
def test_kernels_are_compiled_through_in_one_graph_forward_and_backward():
    q, k, angle, stream, weight, gate = randoms((4, 2, 8), (4, 1, 8), (4, 4), (4, 16), (16,), (16,))
    both = angle.repeat(1, 2)
    cos, sin = both.cos(), both.sin()

    turn, gated = rope.backend("triton"), swiglu.backend("triton")
    clamped, norm = clamped_gate.backend("triton"), rms_norm.backend("triton")
    add_norm = add_rms_norm.backend("triton")

    def some_of_a_block(q, k, stream, weight, gate):
        turned_q, turned_k = turn(q, k, cos, sin)
        added = turned_q.flatten(1) + turned_k.flatten(1).repeat(1, 2)
        total, normed = add_norm(added, stream, weight, EPS)
        inner = clamped(gated(normed * gate, normed).repeat(1, 2), ALPHA, LIMIT)
        return norm(total + inner, weight, EPS)

    inputs = (q, k, stream, weight, gate)
    compiled = torch.compile(some_of_a_block, fullgraph=True, backend="aot_eager")
    want, slopes = results(some_of_a_block, inputs, ())
    got, _ = results(compiled, inputs, (), slopes)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
