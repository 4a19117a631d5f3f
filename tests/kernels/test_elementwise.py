"""Elementwise operations: references against other definitions, Triton against the references."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from penstock_kernels.clamped_swiglu import clamped_gate
from penstock_kernels.glu import geglu, swiglu
from penstock_kernels.op import INTERPRETED, UnsupportedError
from penstock_kernels.rms_norm import add_rms_norm, rms_norm
from penstock_kernels.rope import rope
from penstock_kernels.spans import to_spans
from tests.kernels.where import CAN_RUN_TRITON, DEVICE, needs_triton


def randoms(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def forward_backward(function, *tensors):
    *inputs, dy = tensors
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    y = function(*inputs)
    return y, *torch.autograd.grad(y, inputs, dy)


@needs_triton
def test_a_weight_that_does_not_learn_costs_no_gradient():
    x, weight, dy = randoms((7, 33), (33,), (7, 33))
    operator = torch.ops.penstock.rms_norm_gradients.default
    with_it, dweight = operator(x, weight, dy, None, torch.ones(7, device=DEVICE), False, True)
    without, none = operator(x, weight, dy, None, torch.ones(7, device=DEVICE), False, False)
    assert torch.equal(with_it, without)
    assert (dweight.shape, none.shape) == ((33,), (0,))
    [dx] = forward_backward(lambda x: rms_norm.backend("triton")(x, weight, 1e-6), x, dy)[1:]
    [want] = forward_backward(lambda x: rms_norm.reference(x, weight, 1e-6), x, dy)[1:]
    torch.testing.assert_close(dx, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (torch.arange(24).view(2, 3, 4), False),
        (torch.arange(24).view(2, 3, 4)[..., 1:3], False),
        (torch.arange(24).view(2, 12)[:, :8].unflatten(-1, (2, 4)), False),
        (torch.arange(24).view(6, 4)[::2], False),
        (torch.arange(24).view(2, 3, 4)[:, :2, :3], True),
        (torch.arange(24).view(4, 6).T, True),
        (torch.arange(24)[::3], True),
        (torch.arange(8).expand(3, 8), False),
        (torch.arange(24).view(2, 3, 4).transpose(0, 1), True),
        (torch.arange(24).view(3, 2, 4)[:, :1], False),
        (torch.empty(0, 5), False),
    ],
    ids=lambda value: (
        f"{tuple(value.shape)} by {value.stride()}" if hasattr(value, "shape") else ""
    ),
)
def test_elements_lie_where_their_spans_say(x, copied):
    tensor, length, stride = to_spans(x)
    count = x.numel() // length if length else 0
    found = torch.as_strided(tensor, (count, length), (stride, 1), tensor.storage_offset())
    assert torch.equal(found.flatten(), x.flatten())
    assert (tensor is not x) == copied


@pytest.mark.parametrize("backend", [*rms_norm.backends[1:]])
def test_rows_to_be_normalized_may_lie_anywhere(backend):
    if backend == "triton" and not CAN_RUN_TRITON:
        pytest.skip("needs CUDA or Triton's interpreter")
    x, weight, dy = randoms((5, 7, 33), (33,), (7, 5, 33))
    norm = rms_norm.backend(backend)
    got = forward_backward(lambda x, w: norm(x.transpose(0, 1), w, 1e-5), x, weight, dy)
    apart = dy.transpose(0, 1).contiguous().transpose(0, 1)
    also = forward_backward(lambda x, w: norm(x.transpose(0, 1), w, 1e-5), x, weight, apart)
    want = forward_backward(
        lambda x, w: F.rms_norm(x.transpose(0, 1), (33,), w, 1e-5), x, weight, dy
    )
    for found in (got, also):
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_rms_norm_is_torchs_in_fp32():
    x, weight, dy = randoms((9, 33), (33,), (9, 33))
    got = forward_backward(lambda x, w: rms_norm.reference(x, w, 1e-5), x, weight, dy)
    want = forward_backward(lambda x, w: F.rms_norm(x, (33,), w, 1e-5), x, weight, dy)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_with_1_plus_weight_is_gemmas_to_the_bit(dtype):
    x, weight = randoms((9, 32), (32,), dtype=dtype)
    theirs = GemmaRMSNorm(32, 1e-5).to(DEVICE, dtype)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        assert rms_norm.reference(x, weight, 1e-5, True).equal(theirs(x))


def test_an_fp32_weight_leaves_a_bf16_stream_in_bf16():
    x, weight = randoms((3, 8), (8,))
    assert rms_norm(x.bfloat16(), weight, 1e-6).dtype == torch.bfloat16


@pytest.mark.parametrize("plus_one", [False, True], ids=["", "1 + weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_is_the_same_to_the_bit_where_no_gradient_is_wanted(dtype, plus_one):
    x, weight = randoms((7, 3, 24), (24,))
    want = rms_norm.backend("lean")(x.to(dtype).requires_grad_(), weight, 1e-6, plus_one)
    with torch.no_grad():
        got = rms_norm.backend("lean")(x.to(dtype), weight, 1e-6, plus_one)
    assert got.dtype == dtype
    assert got.equal(want)


def test_rope_is_transformers_to_the_bit_and_on_a_gpu_but_for_fused_multiply_adds():
    q, k, angle = randoms((5, 4, 16), (5, 2, 16), (5, 8))
    both = torch.cat((angle, angle), dim=-1)
    got = rope(q, k, both.cos(), both.sin())
    # transformers has a batch first, and heads before tokens.
    batched_q, batched_k = (part.transpose(0, 1)[None] for part in (q, k))
    want = apply_rotary_pos_emb(batched_q, batched_k, both.cos()[None], both.sin()[None])
    for mine, theirs in zip(got, want, strict=True):
        off = 0 if DEVICE == "cpu" else 1e-6
        torch.testing.assert_close(mine, theirs[0].transpose(0, 1), rtol=off, atol=off)


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
    assert not INTERPRETED or not swiglu.fast["triton"].is_auto_selectable


def test_a_plain_call_compiles_without_a_graph_break():
    gate, up, weight = randoms((4, 8), (4, 8), (8,))

    @torch.compile(fullgraph=True, backend="eager")
    def both(gate, up, weight):
        return rms_norm(swiglu(gate, up), weight, 1e-6)

    want = rms_norm(swiglu(gate, up), weight, 1e-6)
    torch.testing.assert_close(both(gate, up, weight), want)


ONES = partial(torch.ones, device=DEVICE)
REFUSED = {
    r"gate is \(2, 4\) and up is \(2, 3\)": (swiglu, ONES(2, 4), ONES(2, 3)),
    "gate is torch.float32 and up is torch.bfloat16": (geglu, ONES(2, 3), ONES(2, 3).bfloat16()),
    "a tensor is in torch.float64": (swiglu, ONES(2, 3).double(), ONES(2, 3).double()),
    r"\(2, 3\), which is not gate and up by turns": (clamped_gate, ONES(2, 3), 1.7, 7.0),
    "the limit is -1.0": (clamped_gate, ONES(2, 4), 1.7, -1.0),
    r"x is \(2, 4\) and its weight is \(3,\)": (rms_norm, ONES(2, 4), ONES(3), 1e-6),
    "rows are 0 wide": (rms_norm, ONES(2, 0), ONES(0), 1e-6),
    "eps is -1.0": (rms_norm, ONES(2, 4), ONES(4), -1.0),
    r"x is \(4,\) and the stream is \(2, 4\)": (add_rms_norm, ONES(4), ONES(2, 4), ONES(4), 1e-6),
    "the stream is torch.float16": (add_rms_norm, ONES(4), ONES(4).half(), ONES(4), 1e-6),
    r"q is \(5, 1, 4\), k is \(6, 1, 4\)": (rope, ONES(5, 1, 4), ONES(6, 1, 4), *[ONES(5, 4)] * 2),
    "6 features are to turn of heads 4": (rope, *[ONES(5, 1, 4)] * 2, *[ONES(5, 6)] * 2),
    "3 features are to turn": (rope, *[ONES(5, 1, 4)] * 2, *[ONES(5, 3)] * 2),
    "angles are to learn": (rope, *[ONES(5, 1, 4)] * 2, *[ONES(5, 4).requires_grad_()] * 2),
}


@pytest.mark.skipif(
    "triton" not in swiglu.backends, reason="triton is not published for this system"
)
@pytest.mark.parametrize("reason", REFUSED)
def test_a_named_backend_says_why_it_cannot(reason):
    op, *inputs = REFUSED[reason]
    with pytest.raises(UnsupportedError, match=reason):
        op.backend("triton")(*inputs)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="it has auto, reference"):
        swiglu.backend("cuda")
