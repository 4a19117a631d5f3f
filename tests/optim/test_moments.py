"""AdamW's moments in few bits: how far each number may be off."""

import pytest
import torch

from penstock.optim import quantized_states
from penstock.optim.quantized_states import (
    BLOCK,
    LEVELS,
    dequantize_states,
    quantize_states,
    size_in,
)

FORMS = list(LEVELS)
COUNTS = [1, 2, 127, 128, 129, 1000]


def moments_like_adams(count):
    """Numbers some magnitudes apart, a few of them 0."""
    generator = torch.Generator().manual_seed(count)
    first = torch.randn(count, generator=generator) * torch.logspace(-9, 1, count)
    second = first.square() * torch.rand(count, generator=generator)
    zeros = torch.rand(count, generator=generator) < 0.1
    return first.masked_fill(zeros, 0), second.masked_fill(zeros, 0)


def blocks_of(values):
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", COUNTS)
def test_a_first_moment_is_off_by_half_a_step_of_its_block(form, count):
    first, _ = moments_like_adams(count)
    found = dequantize_states(quantize_states(first, "first", form), count, "first", form)
    half = LEVELS[form] // 2
    limit = blocks_of(first).abs().amax(1, keepdim=True) / half / 2
    assert ((blocks_of(found) - blocks_of(first)).abs() <= limit * (1 + 1e-5)).all()
    assert (found[first == 0] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", COUNTS)
def test_a_second_moment_is_off_by_half_a_step_of_its_blocks_logarithms(form, count):
    _, second = moments_like_adams(count)
    found = dequantize_states(quantize_states(second, "second", form), count, "second", form)
    assert torch.equal(found == 0, second == 0)
    blocks, expanded = blocks_of(second), blocks_of(found)
    for block, its in zip(blocks, expanded, strict=True):
        there = block > 0
        if there.any():
            logs = block[there].double().log2()
            limit = (logs.max() - logs.min()) / (LEVELS[form] - 1) / 2
            # Logarithms of small numbers are some ten digits before the point, in fp32.
            assert (its[there].double().log2() - logs).abs().max() <= limit + 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", [[0.0] * 5, [3.0], [7.0] * 200, [1e-30, 1e-30]], ids=str)
def test_numbers_that_are_all_the_same_stay_what_they_are(form, values):
    values = torch.tensor(values)
    for moment in ("first", "second"):
        found = dequantize_states(quantize_states(values, moment, form), len(values), moment, form)
        torch.testing.assert_close(found, values, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_are_compressed_in_parts_are_the_same(form, monkeypatch):
    for moment, values in zip(("first", "second"), moments_like_adams(1000), strict=True):
        whole = quantize_states(values.view(10, 100), moment, form)
        monkeypatch.setattr(quantized_states, "CHUNK", 2 * BLOCK)
        for one, other in zip(whole, quantize_states(values, moment, form), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("moment", ["first", "second"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_is_not_hidden(form, moment, wrong):
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = wrong
    values[2 * BLOCK :] = wrong
    found = dequantize_states(quantize_states(values, moment, form), len(values), moment, form)
    assert torch.equal(found[:BLOCK], values[:BLOCK])
    assert not found[BLOCK:].isfinite().any()


@pytest.mark.parametrize("count", COUNTS)
def test_four_bits_take_half_of_what_eight_take(count):
    values = torch.ones(count)
    for form in FORMS:
        codes, scales = quantize_states(values, "first", form)
        assert (len(codes), len(scales)) == size_in(form, count)
    assert size_in("int4", count)[0] == -(-size_in("int8", count)[0] // 2)
