"""Linear attention on CPUs, judged by the recurrence in fp64 and by transformers' functions."""

from collections.abc import Callable

import pytest
import torch
from torch.library import opcheck

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.linear_attention import chunked, decode_step, linear_attention, ssd
from penstock_kernels.op import UnsupportedError
from tests.kernels.linear_attention.cases import drawn, error

pytestmark = pytest.mark.usefixtures("poisoned")

ROUNDING = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}
HUNDREDS = [
    range(12),
    *(pytest.param(range(at, at + 27), marks=pytest.mark.exhaustive) for at in range(12, 200, 27)),
]

decode: Callable[..., tuple[torch.Tensor, torch.Tensor]] = decode_step
on_cpu: Callable[..., tuple[torch.Tensor, torch.Tensor]] = linear_attention.backend("chunked")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", HUNDREDS)
def test_chunks_and_their_gradients_are_the_recurrence(seeds, monkeypatch):
    for seed in seeds:
        monkeypatch.setattr(chunked, "CHUNK", (32, 64, 8)[seed % 3])
        monkeypatch.setattr(chunked, "KEPT", (1, 3, 64, 2)[seed % 4])
        case = drawn(seed)
        want = case.with_gradients(linear_attention.reference)
        for mine, exact in zip(case.with_gradients(on_cpu), want, strict=True):
            assert mine.dtype == exact.dtype
            assert error(mine, exact) < ROUNDING[torch.float64], case.lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_in_fewer_bits_are_those_of_fp64_rounded(dtype):
    for seed in range(6):
        case = drawn(seed, widths=(16, 33), lengths=(3, 40, 65)).rounded(dtype)
        want = case.with_gradients(linear_attention.reference)
        with torch.autocast("cpu", torch.bfloat16):
            got = case.with_gradients(on_cpu, dtype)
        for mine, exact in zip(got, want, strict=True):
            assert error(mine, exact) < ROUNDING[dtype]


@pytest.mark.parametrize("channels", [False, True])
def test_nothing_overflows_where_decays_are_strong(channels):
    case = drawn(3, channels=channels, lengths=(65,))
    q, k, v, log_decay, _, _ = case.tensors
    strong = torch.where(log_decay < log_decay.median(), -60.0, log_decay)
    segments = VarlenMetadata.of(case.lengths)
    given = [x.float() for x in (q, k, v, strong)]
    given = [x.requires_grad_() for x in given]
    y, _ = on_cpu(*given, None, segments, 1.0)
    exact, _ = linear_attention.reference(q, k, v, strong, None, segments, 1.0)
    # A sum of a chunk's log decays is rounded too.
    assert error(y, exact) < 2e-4
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(y.sum(), given))


@pytest.mark.parametrize("channels", [False, True])
def test_a_packed_neighbour_changes_nothing(channels):
    case = drawn(5, channels=channels)
    q, k, v, log_decay, beta, _ = case.tensors
    T = len(q)

    def beside(other):
        def more(x):
            return None if x is None else torch.cat((other * x[:50] + other - 1, x, other * x[:9]))

        given = [more(x) for x in (q, k, v, log_decay, beta)]
        given = [None if x is None else x.detach().requires_grad_() for x in given]
        segments = VarlenMetadata.of((50, *case.lengths, 9))
        y, states = on_cpu(*given, segments, 1.0)
        learning = [x for x in given if x is not None]
        slopes = torch.autograd.grad(y, learning, torch.cat((v[:50], v, v[:9])))
        return [x[50 : 50 + T] for x in (y, *slopes)] + [states[1:-1]]

    for mine, theirs in zip(beside(1), beside(0.5), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_documents_continue_from_their_states_and_decode_token_by_token():
    case = drawn(7, lengths=(65, 100))
    q, k, v, log_decay, beta, initial = case.tensors
    segments = VarlenMetadata.of(case.lengths)
    y, last = on_cpu(q, k, v, log_decay, beta, segments, 1.0, initial)
    start = 0
    for document, length in enumerate(case.lengths):
        one = [None if x is None else x[start : start + length] for x in case.tensors[:5]]
        state = None if initial is None else initial[document : document + 1]
        head, tail = (
            [None if x is None else x[at] for x in one] for at in (slice(40), slice(40, None))
        )
        _, state = on_cpu(*head, VarlenMetadata.of((40,)), 1.0, state)
        for at in range(length - 40):
            token = [None if x is None else x[at : at + 1] for x in tail]
            out, state = decode(*token, state, 1.0)
            torch.testing.assert_close(out, y[start + 40 + at][None], atol=1e-10, rtol=0)
        torch.testing.assert_close(state[0], last[document], atol=1e-10, rtol=0)
        start += length


def test_it_is_what_transformers_computes():
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    for seed, name, theirs in (
        (11, "head", qwen3_next.torch_recurrent_gated_delta_rule),
        (12, "channel", kimi_linear.recurrent_kimi_delta_attention),
    ):
        case = drawn(seed, documents=1, lengths=(70,), channels=name == "channel")
        q, k, v, log_decay = (x.float() for x in case.tensors[:4])
        beta = torch.rand(v.shape[:2])
        G, N = q.shape[1], v.shape[1]
        wide = [x.repeat_interleave(N // G, dim=1)[None] for x in (q, k)]
        want, state = theirs(
            *wide, v[None], log_decay[None], beta[None], initial_state=None, output_final_state=True
        )
        got, last = on_cpu(q, k, v, log_decay, beta, VarlenMetadata.of((70,)), q.shape[-1] ** -0.5)
        assert error(got, want[0].double()) < ROUNDING[torch.float32], name
        assert error(last, state.double()) < ROUNDING[torch.float32], name


def test_mamba_2_is_a_case_of_it():
    T, N, P, G, S = 70, 4, 6, 2, 5
    x, B, C = torch.randn(T, N, P), torch.randn(T, G, S), torch.randn(T, G, S)
    dt, A, D = torch.rand(T, N), -torch.rand(N), torch.rand(N)
    y, last = ssd(on_cpu, x, dt, A, B, C, VarlenMetadata.of((40, 30)), D)
    state = torch.zeros(N, P, S)
    for t in range(T):
        if t == 40:
            state = torch.zeros(N, P, S)
        b, c = (m[t].repeat_interleave(N // G, dim=0)[:, None, :] for m in (B, C))
        state = (dt[t] * A).exp()[:, None, None] * state + dt[t][:, None, None] * x[t][
            ..., None
        ] * b
        torch.testing.assert_close(
            y[t], (state * c).sum(-1) + D[:, None] * x[t], atol=1e-4, rtol=1e-4
        )
    torch.testing.assert_close(last[1], state.mT, atol=1e-5, rtol=1e-4)


def test_what_does_not_fit_is_refused():
    case = drawn(1, documents=2)
    q, k, v, log_decay, _, _ = case.tensors
    segments = VarlenMetadata.of(case.lengths)
    with pytest.raises(UnsupportedError, match="log_decay is"):
        on_cpu(q, k, v, log_decay[:-1], None, segments, 1.0)
    with pytest.raises(UnsupportedError, match="q is"):
        on_cpu(q[:-1], k, v, log_decay, None, segments, 1.0)
    with pytest.raises(UnsupportedError, match="documents"):
        on_cpu(q, k, v, log_decay, None, VarlenMetadata.of((len(q) + 1,)), 1.0)
    # No backend takes it, and the reference would broadcast it over heads.
    with pytest.raises(ValueError, match="beta is"):
        linear_attention(q, k, v, log_decay, log_decay[:, :1], segments, 1.0)


def test_pytorch_finds_no_fault_with_the_operator():
    case = drawn(4, documents=2, lengths=(3, 40), widths=(4,))
    tensors = [None if x is None else x.requires_grad_() for x in case.tensors]
    cu_seqlens = VarlenMetadata.of(case.lengths).cu_seqlens
    opcheck(
        torch.ops.penstock.linear_attention_chunked.default,
        (*tensors, cu_seqlens, 1.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_it_is_compiled_in_one_graph():
    case = drawn(4, documents=3, lengths=(3, 40), widths=(4,))
    run = torch.compile(on_cpu, fullgraph=True, backend="aot_eager")
    for mine, exact in zip(case.with_gradients(run), case.with_gradients(on_cpu), strict=True):
        torch.testing.assert_close(mine, exact)


def test_start_rows_are_refused_by_every_backend():
    segments = VarlenMetadata.of([4], start_rows=[4, 3, 4, 4])
    x_TNK = torch.randn(4, 1, 8)
    with pytest.raises(ValueError, match="start rows"):
        linear_attention(x_TNK, x_TNK, x_TNK, -torch.rand(4, 1), None, segments, 1.0)
