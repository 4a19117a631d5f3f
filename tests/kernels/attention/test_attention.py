"""Attention over packed documents, judged by each document's own dense softmax attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kernels.attention import VarlenMetadata, attention
from penstock_kernels.op import UnsupportedError
from tests.dense import dense_with_gradients, relative_error
from tests.kernels.attention.attention_cases import HUNDRED, drawn, of_shared_prompts

HEADS, KV_HEADS, WIDTH = 4, 2, 16
SCALE = WIDTH**-0.5
pytestmark = pytest.mark.usefixtures("poisoned")

ADVERSARIAL = [
    [1],
    [1, 1, 1],
    [37],
    [8, 8, 8],
    [2, 3, 5, 7, 11, 13, 17, 19, 23],
    [1, 300, 1, 2, 299, 1],
    [300, *[1] * 20],
    [*range(1, 40)],
]


def inputs(tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, heads, WIDTH, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def forward_backward(backend, lengths, dtype=torch.float32):
    q, k, v = inputs(sum(lengths), dtype)
    y = attention.backend(backend)(q, k, v, VarlenMetadata.of(lengths), SCALE)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return y, *torch.autograd.grad(y, (q, k, v), dy)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
NARROW = [(None, SINKS), (1, None), (5, SINKS), (16, None), (37, SINKS)]
"""Windows narrower than most documents, of one token, and of whole chunks; and sinks."""


def all_gradients(backend, lengths, window, sinks, dtype=torch.float32):
    """y and the gradients of all inputs, and of the sinks if there are any."""
    q, k, v = inputs(sum(lengths), dtype)
    more = [] if sinks is None else [sinks.to(dtype, copy=True).requires_grad_()]
    y = attention.backend(backend)(q, k, v, VarlenMetadata.of(lengths), SCALE, window, *more)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return [y, *torch.autograd.grad(y, (q, k, v, *more), dy)], (q, k, v, dy)


@pytest.mark.parametrize(("window", "sinks"), NARROW, ids=lambda part: "" if part is None else None)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_windows_and_sinks_are_those_of_the_definition(backend, window, sinks):
    for lengths in ([37], [8, 8, 8], [1, 100, 1, 2, 98, 1], [3, 1, 20, 19]):
        got, (q, k, v, dy) = all_gradients(backend, lengths, window, sinks)
        want = dense_with_gradients(q, k, v, dy, lengths, SCALE, window, sinks)
        for mine, exact in zip(got, want, strict=True):
            torch.testing.assert_close(mine.double(), exact.double(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("seeds", HUNDRED)
def test_a_hundred_random_cases_are_what_their_dense_masks_say(seeds):
    for seed in seeds:
        case = drawn(seed)
        q, k, v, dy, sinks = case.tensors()
        more = {"soft_cap": case.soft_cap, **case.masks}
        want = dense_with_gradients(
            q, k, v, dy, case.lengths, case.scale, case.window, sinks, **more
        )
        got = case.with_gradients(attention.backend("eager"))
        # fp64, and sums of at most 131 terms.
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12, msg=str(case))


# Of the largest part, as a gradient may be the little that is left of two that cancel. fp32: sums;
# 16 bits: inputs, results, and what a reference keeps between its operations.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("seeds", HUNDRED)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_hundred_random_cases_are_those_of_the_reference_in_fp64_rounded(backend, dtype, seeds):
    for seed in seeds:
        case = drawn(seed, soft_caps=backend == "eager")
        want = case.with_gradients(attention.backend("eager"))
        got = case.with_gradients(attention.backend(backend), dtype)
        largest = max(exact.norm() for exact in want)
        for mine, exact in zip(got, want, strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - exact).norm() < ROUNDING[dtype] * largest, case


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_answers_that_share_a_prompt_see_it_and_themselves_alone(backend, window):
    groups = [(5, 4, 7), (1, 1, 1), (40, 30, 3)]
    lengths, start_rows = of_shared_prompts(groups)
    q, k, v = (part.detach() for part in inputs(sum(lengths)))
    attend = attention.backend(backend)
    y = attend(q, k, v, VarlenMetadata.of(lengths, start_rows=start_rows), SCALE, window, SINKS)
    first = 0
    for prompt, chosen, rejected in groups:
        tokens = torch.arange(first, first + prompt + chosen + rejected)
        for answer in (tokens[prompt : prompt + chosen], tokens[prompt + chosen :]):
            alone = torch.cat((tokens[:prompt], answer))
            document = VarlenMetadata.of([len(alone)])
            want = attend(q[alone], k[alone], v[alone], document, SCALE, window, SINKS)
            torch.testing.assert_close(y[alone], want, atol=2e-6, rtol=1e-5)
        first += len(tokens)


def test_start_rows_that_hide_nothing_cost_nothing():
    assert VarlenMetadata.of([3, 2], start_rows=[3, 3, 9, 5, 5]).start_rows is None
    assert VarlenMetadata.of([3, 2], start_rows=[3, 2, 3, 5, 5]).start_rows is not None


@pytest.mark.parametrize(
    ("start_rows", "says"),
    [([1, 2], "2 start rows for 3 tokens"), ([3, 1, 3], "token 1 would be hidden from token 1")],
)
def test_start_rows_are_one_for_each_token_and_hide_none_from_itself(start_rows, says):
    with pytest.raises(ValueError, match=says):
        VarlenMetadata.of([3], start_rows=start_rows)


@pytest.mark.parametrize("runs", [[(2, 4)], [(0, 2), (1, 3)], [(0, 0)], [(4, 6)]], ids=str)
def test_bidirectional_runs_are_in_order_and_each_in_a_document(runs):
    with pytest.raises(ValueError, match="a run of tokens"):
        VarlenMetadata.of([3, 2], bidirectional=runs)


def test_a_document_costs_a_window_for_each_token_and_not_its_square(monkeypatch):
    calls, kernel = [], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def counted(q, k, *rest, **settings):
        calls.append(q.shape[0] * q.shape[2] * k.shape[2])
        return kernel(q, k, *rest, **settings)

    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", counted, raising=True
    )
    q, k, v = (part.detach() for part in inputs(1000))
    attention.backend("sdpa")(q, k, v, VarlenMetadata.of([1000]), SCALE, 16)
    assert 1000 * 16 <= sum(calls) <= 1000 * 3 * 16


def by_definition(q, k, v):
    """One document, one head, one query at a time: softmax(q.k * scale) over the past, times v."""
    rows = []
    for t in range(q.shape[0]):
        heads = []
        for n in range(HEADS):
            kv = n // (HEADS // KV_HEADS)
            weights = torch.softmax(k[: t + 1, kv] @ q[t, n] * SCALE, dim=0)
            heads.append(weights @ v[: t + 1, kv])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_eager_is_causal_attention_within_each_document():
    lengths = [3, 1, 6]
    q, k, v = (part.detach() for part in inputs(10))
    alone = zip(*(part.split(lengths) for part in (q, k, v)), strict=True)
    expected = [by_definition(*parts) for parts in alone]
    got = attention.backend("eager")(q, k, v, VarlenMetadata.of(lengths), SCALE)
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", ADVERSARIAL, ids=lambda lengths: f"{len(lengths)}docs")
def test_sdpa_agrees_with_eager_forward_and_backward(lengths):
    got, want = forward_backward("sdpa", lengths), forward_backward("eager", lengths)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_sdpa_agrees_with_eager_whatever_the_lengths(lengths):
    # fp64, where the two differ by rounding far below any real fault.
    got = forward_backward("sdpa", lengths, torch.float64)
    want = forward_backward("eager", lengths, torch.float64)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_padding_and_the_number_of_calls_are_bounded(lengths):
    segments = VarlenMetadata.of(lengths)
    slots = sum(bucket.num_slots for bucket in segments.buckets)
    assert slots <= sum(max(length / 0.8, length + 16) + 1 for length in lengths)
    # Each bucket is narrower than the one before by a fifth, or by 17 tokens below 80.
    assert len(segments.buckets) <= math.log(5000 / 80) / math.log(1 / 0.8) + 80 / 17 + 2
    assert segments.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def test_documents_of_one_length_are_not_copied():
    assert VarlenMetadata.of([40] * 60).layout is None
    assert VarlenMetadata.of([997]).layout is None
    assert VarlenMetadata.of([40, 41]).layout is not None


def test_sixty_short_documents_take_one_or_two_calls(monkeypatch):
    # What makes them several times faster than a call each, told without a clock.
    lengths = [36 + i % 9 for i in range(60)]
    q, k, v = inputs(sum(lengths))
    sdpa, calls = attention.backend("sdpa"), []
    original = F.scaled_dot_product_attention

    def counted(query, *rest, **settings):
        calls.append(query.shape)
        return original(query, *rest, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    packed = sdpa(q, k, v, VarlenMetadata.of(lengths), SCALE)
    assert len(calls) <= 2
    assert all(masked <= 44 for *_, masked, _ in calls)
    alone = zip(q.split(lengths), k.split(lengths), v.split(lengths), lengths, strict=True)
    expected = [sdpa(a, b, c, VarlenMetadata.of([length]), SCALE) for a, b, c, length in alone]
    torch.testing.assert_close(packed, torch.cat(expected), atol=2e-6, rtol=1e-5)


def test_native_says_why_it_cannot_run_here():
    q, k, v = inputs(4)
    with pytest.raises(UnsupportedError, match="native: its tensors are on cpu, and it needs cuda"):
        attention.backend("native")(q, k, v, VarlenMetadata.of([4]), SCALE)


def test_other_sinks_than_one_for_each_head_are_refused():
    q, k, v = inputs(4)
    with pytest.raises(UnsupportedError, match=r"sinks of shape \(3,\) for 4 query heads"):
        attention.backend("sdpa")(q, k, v, VarlenMetadata.of([4]), SCALE, None, torch.zeros(3))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_window_shows_a_token_itself_at_least(backend):
    q, k, v = inputs(4)
    with pytest.raises(ValueError, match="a window of 0 tokens shows a token nothing"):
        attention.backend(backend)(q, k, v, VarlenMetadata.of([4]), SCALE, 0)


def test_sdpa_caps_no_scores():
    q, k, v = inputs(4)
    with pytest.raises(UnsupportedError, match=r"scores are capped at 30.0, and PyTorch's fused"):
        attention.backend("sdpa")(q, k, v, VarlenMetadata.of([4]), SCALE, None, None, 30.0)
    # A plain call then takes the reference.
    capped = attention(q, k, v, VarlenMetadata.of([4]), SCALE, None, None, 0.1)
    assert relative_error(capped, attention(q, k, v, VarlenMetadata.of([4]), SCALE)) > 1e-3


def test_tokens_that_no_document_holds_are_refused():
    q, k, v = inputs(4)
    with pytest.raises(UnsupportedError, match=r"different numbers of tokens: \[4, 5\]"):
        attention.backend("sdpa")(q, k, v, VarlenMetadata.of([5]), SCALE)


@pytest.mark.parametrize("lengths", [[], [3, 0]], ids=str)
def test_a_document_has_at_least_one_token(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        VarlenMetadata.of(lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", ADVERSARIAL, ids=lambda lengths: f"{len(lengths)}docs")
def test_native_agrees_with_eager_on_cuda(lengths):
    results = []
    for backend in ("native", "eager"):
        parts = [part.detach().to("cuda", torch.bfloat16) for part in inputs(sum(lengths))]
        q, k, v = (part.requires_grad_() for part in parts)
        y = attention.backend(backend)(q, k, v, VarlenMetadata.of(lengths, "cuda"), SCALE)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))))
    torch.testing.assert_close(*results, atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("window", "sinks"), NARROW, ids=lambda part: "" if part is None else None)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_windows_and_sinks_agree_with_eager_on_cuda(backend, window, sinks):
    lengths, results = [1, 300, 1, 2, 299, 1], []
    for name in (backend, "eager"):
        parts = [part.detach().to("cuda", torch.bfloat16) for part in inputs(sum(lengths))]
        q, k, v = (part.requires_grad_() for part in parts)
        more = [] if sinks is None else [sinks.to("cuda", torch.bfloat16)]
        documents = VarlenMetadata.of(lengths, "cuda")
        y = attention.backend(name)(q, k, v, documents, SCALE, window, *more)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))))
    torch.testing.assert_close(*results, atol=5e-2, rtol=5e-2)


def test_chunks_of_documents_are_documents_of_their_own():
    segments = VarlenMetadata.of([7, 3, 6])
    chunks = segments.in_chunks(3)
    assert chunks.lengths == (3, 3, 1, 3, 3, 3)
    assert segments.in_chunks(3) is chunks
    assert segments.in_chunks(7) is segments
    with pytest.raises(ValueError, match="has none"):
        segments.in_chunks(0)
    with pytest.raises(ValueError, match="branches"):
        VarlenMetadata.of([4], start_rows=[4, 3, 4, 4]).in_chunks(2)
