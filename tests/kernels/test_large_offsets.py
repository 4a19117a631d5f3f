"""Kernels reach elements beyond 2^31: the last rows of tensors that are that large.

Memory is not touched but where it is read or written, and of each launch only the last program of
each large axis runs, in Triton's interpreter.
"""

import builtins
import itertools

import numpy
import pytest
import torch

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.causal_conv1d import causal_conv1d
from penstock_kernels.causal_conv1d import triton as conv_triton
from penstock_kernels.clamped_swiglu import clamped_gate
from penstock_kernels.cross_entropy import triton as cross_entropy
from penstock_kernels.cross_entropy.loss_terms import PLAIN, LogitGradFactors
from penstock_kernels.cross_entropy.reference import logits_to_grad_, softmax_stats
from penstock_kernels.dropout import triton as dropout
from penstock_kernels.float8 import triton_quantize as float8
from penstock_kernels.float8.float8_matrix import shape_of_scales
from penstock_kernels.gated_rms_norm import gated_rms_norm
from penstock_kernels.glu import packed_swiglu, swiglu
from penstock_kernels.linear_attention import linear_attention
from penstock_kernels.linear_attention import triton as linear_triton
from penstock_kernels.op import INTERPRETED
from penstock_kernels.permute import permute, sort_by_expert, unpermute
from penstock_kernels.quant import dequantize, get_format, quantize
from penstock_kernels.quant.quantized_tensor import QuantizedTensor
from penstock_kernels.rms_norm import add_rms_norm, rms_norm
from penstock_kernels.rope import rope
from tests.turns import taking_turns

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

LARGE = 64
"""Programs of an axis from which on only the last runs."""

ROWS = 2**19 + 1
WIDTH = 4096
"""ROWS x WIDTH elements are more than 2^31."""


@pytest.fixture(autouse=True)
def last_programs(monkeypatch):
    from triton.runtime import interpreter

    def last_of(*bounds):
        [stop, *others] = bounds
        is_large = not others and stop > LARGE
        return builtins.range(stop - 1, stop) if is_large else builtins.range(*bounds)

    monkeypatch.setattr(interpreter, "range", last_of, raising=False)
    # It would copy every tensor onto itself.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    # What programs that do not run leave unwritten is whatever memory held, NaN among it.
    with numpy.errstate(all="ignore"):
        yield


def huge(*shape, dtype=torch.bfloat16):
    """An empty tensor whose last row is random."""
    x = torch.empty(shape, dtype=dtype)
    x[-1] = torch.randn(shape[1:], generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    return x


CASES = {
    "rms_norm": (rms_norm, [(ROWS, WIDTH), (WIDTH,)], (1e-6,)),
    "rms_norm of heads": (rms_norm, [(ROWS, 32, 128), (128,)], (1e-6,)),
    "add_rms_norm": (add_rms_norm, [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)], (1e-6,)),
    "gated_rms_norm": (gated_rms_norm, [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)], (1e-6,)),
    "swiglu": (swiglu, [(ROWS, WIDTH), (ROWS, WIDTH)], ()),
    "packed_swiglu": (packed_swiglu, [(ROWS, 2 * WIDTH)], ()),
    "clamped_gate": (clamped_gate, [(ROWS, 2 * WIDTH)], (1.702, 7.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", taking_turns(CASES, 2))
def test_the_last_row_is_that_of_the_reference(name):
    op, shapes, more = CASES[name]
    # Gradients of weights are sums over all rows.
    given = [huge(*one).requires_grad_() if len(one) > 1 else weight(*one) for one in shapes]
    found = several(op.backend("triton")(*given, *more))
    slopes = [huge(*y.shape) for y in found]
    ends = [(x[-1:] if x.dim() > 1 else x).detach().float().requires_grad_() for x in given]
    want = several(op.reference(*ends, *more))
    for mine, theirs in zip(found, want, strict=True):
        assert mine.numel() > 2**31
        close(mine[-1:], theirs)
    learning = [at for at, x in enumerate(given) if x.requires_grad]
    mine = torch.autograd.grad(found, [given[at] for at in learning], slopes)
    theirs = torch.autograd.grad(
        want, [ends[at] for at in learning], [slope[-1:].float() for slope in slopes]
    )
    for one, other in zip(mine, theirs, strict=True):
        close(one[-1:], other)


def weight(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5


def several(found):
    return found if isinstance(found, tuple) else (found,)


def close(mine, theirs):
    """Of what the last program computes: at least so many elements."""
    ends = (x.detach().flatten()[-512:].float() for x in (mine, theirs))
    # bfloat16 is cut off, not rounded, by the interpreter.
    torch.testing.assert_close(*ends, atol=5e-2, rtol=5e-2)


def test_the_last_token_is_turned():
    q, k = huge(ROWS, 32, 128).requires_grad_(), huge(ROWS, 1, 128).requires_grad_()
    cos, sin = (huge(ROWS, 128, dtype=torch.float32) for _ in range(2))
    for angles in (cos, sin):
        angles[-1, 64:] = angles[-1, :64]
    turned, _ = rope.backend("triton")(q, k, cos, sin)
    ends = (q[-1:].detach().float(), k[-1:].detach().float(), cos[-1:], sin[-1:])
    want, _ = rope.reference(*ends)
    close(turned[-1:], want)


def test_the_last_row_of_logits_has_its_loss_and_gradient():
    V = 2**17
    rows = 2**31 // V + 1
    logits, labels = huge(rows, V), torch.full((rows,), V - 5)
    found = cross_entropy.tally(logits, labels, PLAIN)
    end = logits[-1:].clone()
    want = softmax_stats(end.float(), labels[-1:], PLAIN)
    close(found.log_sum[-1:], want.log_sum)
    close(found.target[-1:], want.target)
    ones = torch.ones(rows)
    factors = LogitGradFactors(ones, ones, None)
    cross_entropy.slope_(logits, labels, found.log_sum, factors, PLAIN)
    ends = LogitGradFactors(ones[-1:], ones[-1:], None)
    exact = end.float()
    logits_to_grad_(exact, labels[-1:], want.log_sum, ends, PLAIN)
    close(logits[-1:], exact)


def test_the_last_token_is_moved_to_its_expert_and_back():
    tokens, K = ROWS // 2 + 1, 2
    choice = torch.zeros(tokens, K, dtype=torch.int64)
    choice[:, 1] = 1
    order = sort_by_expert.reference(choice, 2)
    x, weights = huge(tokens, WIDTH).requires_grad_(), torch.rand(tokens, K, requires_grad=True)
    rows = permute.backend("triton")(x, order)
    assert rows.numel() > 2**31
    assert torch.equal(rows[-1], x[-1])
    y = huge(*rows.shape).requires_grad_()
    with torch.no_grad():
        y[order.row_of_copy[-1]] = torch.randn(K, WIDTH).bfloat16()
    back = unpermute.backend("triton")(y, weights, order)
    close(back[-1], (y[order.row_of_copy[-1]].float() * weights[-1][:, None]).sum(0))
    slope = huge(*back.shape)
    dy, _ = torch.autograd.grad(back, [y, weights], slope)
    close(dy[-1], slope[-1].float() * weights[-1, 1])


def test_the_last_row_is_dropped_by_its_own_draws():
    x, places = huge(ROWS, WIDTH), torch.arange(ROWS)
    found = dropout.drop(x, places, 0.5, 3, 7)
    kept = found[-1] != 0
    assert 0.4 < kept.float().mean() < 0.6
    close(found[-1][kept], 2 * x[-1][kept])


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16], ids=str)
def test_the_last_row_of_a_matrix_is_updated(states):
    from penstock_kernels.adamw import reference, triton
    from penstock_kernels.adamw.reference import Settings

    settings = Settings(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3)
    kinds = (torch.bfloat16, torch.bfloat16, states, states)
    weight, gradient, first, second = (huge(ROWS, WIDTH, dtype=kind) for kind in kinds)
    second[-1].abs_()
    tensors = (weight, gradient, first, second)
    ends = (w, g, m, v) = tuple(tensor[-1:].clone() for tensor in tensors)
    triton.adamw_(weight, gradient, first, second, settings)
    reference.adamw_(w, g, m, v, settings)
    for mine, theirs in zip(tensors, ends, strict=True):
        close(mine[-1:], theirs)


@pytest.mark.parametrize("sharing", ["tensor", "rows", "groups", "tiles"])
def test_the_last_row_is_quantized_to_fp8(sharing):
    x = huge(ROWS, WIDTH)
    scales = torch.ones(shape_of_scales(sharing, *x.shape))
    found = float8.quantize(x, "e4m3", sharing, scales)
    close(found.codes[-1:].float(), x[-1:].float().to(torch.float8_e4m3fn).float())


def test_the_last_rows_are_dequantized():
    few = quantize.reference(torch.randn(16, 512), get_format("nf4"))
    rows = 2**31 // 512 + 16
    large = []
    for tensor in (few.codes, few.scales):
        large.append(tensor.new_empty(rows, *tensor.shape[1:]))
        large[-1][-16:] = tensor
    found = dequantize.backend("triton")(QuantizedTensor(few.format, 512, *large), torch.float32)
    close(found[-16:], dequantize.reference(few, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("has_rule", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_last_document_attends_linearly(has_rule, monkeypatch):
    monkeypatch.setattr(linear_triton, "_planned", planned)
    K, compared = 64, 32
    lengths = (*[ROWS // LARGE] * LARGE, 1)
    segments = VarlenMetadata.of(lengths)
    T = segments.num_tokens
    q, k, v = huge(T, 1, K), huge(T, 1, K), huge(T, 1, WIDTH)
    beta = huge(T, 1).sigmoid() if has_rule else None
    given = [x.requires_grad_() for x in (q, k, v)]
    run = linear_attention.backend("triton")
    y, _ = run(q, k, v, torch.zeros(T, 1), beta, segments, 0.1)
    assert y.numel() > 2**31
    ends = [x[-1:].detach().float().requires_grad_() for x in given]
    rate = None if beta is None else beta[-1:].float()
    one = VarlenMetadata.of((1,))
    want, _ = linear_attention.reference(
        ends[0], ends[1], ends[2], torch.zeros(1, 1), rate, one, 0.1
    )
    close_of(y, want, compared)
    slope = huge(*y.shape)
    mine = torch.autograd.grad(y, given, slope)
    theirs = torch.autograd.grad(want, ends, slope[-1:].float())
    close_of(mine[2], theirs[2], compared)
    # Those of q and k are sums over the values' width, of which only the last block is computed.
    if not has_rule:
        close(mine[0][-1:], theirs[0])


@pytest.mark.slow
def test_the_last_token_is_convolved(monkeypatch):
    # So large, and so few tokens for a program, that the last one takes no seconds.
    monkeypatch.setattr(conv_triton, "TILE", {"ROWS": 16, "BLOCK": WIDTH, "num_warps": 4})
    monkeypatch.setattr(conv_triton, "MOST_PARTIALS", 4096)
    x, taps = huge(ROWS, WIDTH).requires_grad_(), weight(WIDTH, 4)
    segments = VarlenMetadata.of((ROWS - 1, 1))
    y, state = causal_conv1d.backend("triton")(x, taps, None, segments, "silu")
    end = x[-1:].detach().float().requires_grad_()
    one = VarlenMetadata.of((1,))
    want, _ = causal_conv1d.reference(end, taps, None, one, "silu")
    close(y[-1:], want)
    assert torch.equal(state[-1, -1], x[-1])
    slope = huge(*y.shape)
    [mine] = torch.autograd.grad(y, x, slope)
    [theirs] = torch.autograd.grad(want, end, slope[-1:].float())
    close(mine[-1:], theirs)


def planned(cu_seqlens, num_tokens):
    """In PyTorch: of the kernel, too, only the last program would run."""
    rows, firsts = [], [0]
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        rows += [(at, min(64, end - at)) for at in range(start, end, 64)]
        firsts.append(len(rows))
    # The last program is that of the last token.
    assert rows[-1] == (num_tokens - 1, 1)
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(firsts, dtype=torch.int32), len(rows)


def close_of(mine, theirs, compared):
    """The last elements."""
    ends = (x.detach()[-1:].flatten()[-compared:].float() for x in (mine, theirs))
    torch.testing.assert_close(*ends, atol=5e-2, rtol=5e-2)
