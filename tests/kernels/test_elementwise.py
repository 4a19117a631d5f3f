"""Elementwise operations: references against other definitions, Triton against the references."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from penstock_kernels.clamped_gate import clamped_gate
from penstock_kernels.op import INTERPRETED, UnsupportedError
from penstock_kernels.rms_norm import rms_norm
from penstock_kernels.rope import rope
from penstock_kernels.swiglu import swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN_TRITON = INTERPRETED or torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs CUDA or Triton's interpreter")

# fp32: a few roundings of sums. bf16: the reference rounds after every step, Triton once.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (4e-2, 2e-2)}
SHAPES = [(1, 8), (7, 100), (40, 128)]


def randoms(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def forward_backward(function, *tensors):
    *inputs, dy = tensors
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    y = function(*inputs)
    return y, *torch.autograd.grad(y, inputs, dy)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("T", "F"), SHAPES)
def test_triton_swiglu_agrees_with_the_reference(T, F, dtype):
    tensors = randoms((T, F), (T, F), (T, F), dtype=dtype)
    got = forward_backward(swiglu.backend("triton"), *tensors)
    want = forward_backward(swiglu.reference, *tensors)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("T", "F"), SHAPES)
def test_triton_clamped_gate_agrees_with_the_reference(T, F, dtype):
    both, dy = randoms((T, 2 * F), (T, F), dtype=dtype)
    # At the limits, below and above them.
    both[0, :4] = torch.tensor([0.5, -0.5, 0.75, 0.75])
    got = forward_backward(lambda x: clamped_gate.backend("triton")(x, 1.702, 0.5), both, dy)
    want = forward_backward(lambda x: clamped_gate.reference(x, 1.702, 0.5), both, dy)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("T", "D"), SHAPES)
def test_triton_rms_norm_agrees_with_the_reference(T, D, dtype):
    tensors = randoms((T, D), (D,), (T, D), dtype=dtype)
    got = forward_backward(lambda x, w: rms_norm.backend("triton")(x, w, 1e-6), *tensors)
    want = forward_backward(lambda x, w: rms_norm.reference(x, w, 1e-6), *tensors)
    atol, rtol = TOLERANCE[dtype]
    # A weight's gradient sums T terms, and its rounding grows with them.
    torch.testing.assert_close(got, want, atol=atol * T**0.5, rtol=rtol)


@needs_triton
def test_triton_rms_norm_sums_many_rows_into_one_weight_gradient():
    # More rows than there are partial sums, and not a multiple of them.
    x, weight, dy = randoms((601, 4), (4,), (601, 4))
    got = forward_backward(lambda x, w: rms_norm.backend("triton")(x, w, 1e-6), x, weight, dy)
    want = forward_backward(lambda x, w: rms_norm.reference(x, w, 1e-6), x, weight, dy)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@needs_triton
def test_no_tokens_give_no_output_and_zero_gradients():
    x, weight, dy = randoms((0, 8), (8,), (0, 8))
    y, dx, dweight = forward_backward(
        lambda x, w: rms_norm.backend("triton")(x, w, 1e-6), x, weight, dy
    )
    assert y.shape == dx.shape == (0, 8)
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_rms_norm_is_torchs_in_fp32():
    x, weight, dy = randoms((9, 33), (33,), (9, 33))
    got = forward_backward(lambda x, w: rms_norm.reference(x, w, 1e-5), x, weight, dy)
    want = forward_backward(lambda x, w: F.rms_norm(x, (33,), w, 1e-5), x, weight, dy)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_an_fp32_weight_leaves_a_bf16_stream_in_bf16():
    x, weight = randoms((3, 8), (8,))
    assert rms_norm(x.bfloat16(), weight, 1e-6).dtype == torch.bfloat16


def test_rope_is_transformers_to_the_bit():
    q, k, angle = randoms((5, 4, 16), (5, 2, 16), (5, 8))
    both = torch.cat((angle, angle), dim=-1)
    got = rope(q, k, both.cos(), both.sin())
    # transformers has a batch first, and heads before tokens.
    batched_q, batched_k = (part.transpose(0, 1)[None] for part in (q, k))
    want = apply_rotary_pos_emb(batched_q, batched_k, both.cos()[None], both.sin()[None])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs[0].transpose(0, 1))


def test_rope_leaves_scores_depending_on_distance_alone():
    q, k = randoms((1, 1, 16), (1, 1, 16))
    frequencies = 10_000 ** -(torch.arange(0, 16, 2, device=DEVICE) / 16)

    def score(i, j):
        at_i, at_j = (torch.cat([at * frequencies] * 2)[None] for at in (i, j))
        turned_q, _ = rope(q, k, at_i.cos(), at_i.sin())
        _, turned_k = rope(q, k, at_j.cos(), at_j.sin())
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(3, 1), score(40, 38), atol=1e-5, rtol=1e-5)


def test_interpreted_kernels_are_never_picked():
    gate, up = (tensor.cpu() for tensor in randoms((64, 64), (64, 64)))
    assert torch.equal(swiglu(gate, up), swiglu.reference(gate, up))
    assert not INTERPRETED or not swiglu.fast["triton"].may_be_picked


def test_a_plain_call_compiles_without_a_graph_break():
    gate, up, weight = randoms((4, 8), (4, 8), (8,))

    @torch.compile(fullgraph=True, backend="eager")
    def both(gate, up, weight):
        return rms_norm(swiglu(gate, up), weight, 1e-6)

    want = rms_norm(swiglu(gate, up), weight, 1e-6)
    torch.testing.assert_close(both(gate, up, weight), want)


@pytest.mark.skipif(
    "triton" not in swiglu.backends, reason="triton is not published for this system"
)
def test_a_named_backend_says_why_it_cannot():
    with pytest.raises(UnsupportedError, match=r"gate is \(2, 4\) and up is \(2, 3\)"):
        swiglu.backend("triton")(torch.ones(2, 4), torch.ones(2, 3))
    with pytest.raises(UnsupportedError, match=r"x is \(2, 4\) and its weight is \(3,\)"):
        rms_norm.backend("triton")(torch.ones(2, 4), torch.ones(3), 1e-6)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="it has auto, reference"):
        swiglu.backend("cuda")
