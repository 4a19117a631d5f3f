"""Attention on CPUs by strips of queries, judged by the definition in fp64."""

from dataclasses import replace

import pytest
import torch

from penstock_kernels.attention import attention, cpu_strips
from penstock_kernels.attention.segments import LengthBucket
from tests.kernels.attention.attention_cases import HUNDRED, drawn

pytestmark = pytest.mark.usefixtures("poisoned")

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""Of the largest part: sums in fp32; inputs, probabilities and results in bf16."""


@pytest.fixture
def small(monkeypatch):
    """Strips for all documents, of few queries, and few scores at a time."""
    monkeypatch.setattr(cpu_strips, "SHORTEST", 1)
    monkeypatch.setattr(cpu_strips, "QUERIES", {torch.bfloat16: 16, torch.float32: 8})
    monkeypatch.setattr(cpu_strips, "_multiplies", lambda dtype: dtype in ROUNDING)
    monkeypatch.setattr(cpu_strips, "SCORES", 40_000)
    asked = []
    apply = cpu_strips._Strips.apply
    monkeypatch.setattr(cpu_strips._Strips, "apply", lambda *args: asked.append(1) or apply(*args))
    return asked


@pytest.mark.parametrize("seeds", HUNDRED)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_hundred_random_cases_are_those_of_the_reference_rounded(small, dtype, seeds):
    for seed in seeds:
        case = replace(drawn(seed, sinks=False, soft_caps=False, masks=False), window=None)
        want = case.with_gradients(attention.backend("eager"))
        before = len(small)
        got = case.with_gradients(attention.backend("sdpa"), dtype)
        assert len(small) > before
        largest = max(exact.norm() for exact in want)
        for mine, exact in zip(got, want, strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - exact).norm() < ROUNDING[dtype] * largest, case


def test_autocast_does_not_round_scores(small):
    case = replace(drawn(3, sinks=False, soft_caps=False, masks=False), window=None)
    attend = attention.backend("sdpa")
    plain = case.with_gradients(attend, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast = case.with_gradients(attend, torch.float32)
    assert small
    torch.testing.assert_close(cast, plain, atol=0, rtol=0)


def test_they_serve_what_they_are_quicker_for(monkeypatch):
    monkeypatch.setattr(cpu_strips, "_multiplies", lambda dtype: dtype in ROUNDING)

    def serve(width, dtype=torch.float32, heads=(4, 2)):
        q, k = (torch.empty(1, number, 8, dtype=dtype) for number in heads)
        return cpu_strips.should_use(q, k, LengthBucket(1, width))

    assert serve(1024)
    assert not serve(255)
    assert not serve(1024, torch.float64)
    assert not serve(32_768, heads=(8, 1)), "a strip's scores would leave the caches"
