"""Noise on dequantized weights: what is drawn, by plain definitions; cuts; Triton; layers."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kernels.noise import RowKeys, add_noise_
from penstock_kernels.noise.reference import normals
from penstock_kernels.op import UnsupportedError
from penstock_kernels.quant import (
    FORMATS,
    cat,
    dequantize,
    group_linear,
    linear,
    quantize,
    step_size,
)
from tests.kernels.quant.matrices import normal, uneven
from tests.kernels.where import CAN_RUN_TRITON, DEVICE, needs_triton

BACKENDS = ["reference", "triton"] if CAN_RUN_TRITON else ["reference"]
each_format = pytest.mark.parametrize("name", FORMATS)
pytestmark = pytest.mark.usefixtures("poisoned")

KEYS = (0xF00DFACE_89ABCDEF, 5, 2**64 - 1)


def drawn(key, first_row, rows, first_column, columns):
    device = torch.device(DEVICE)
    return normals(RowKeys(rows, key, first_row), first_column, columns, device)


def noise_on(made, runs, backend="reference", *, alpha=1.0, dtype=torch.float32, first_column=0):
    """What is added, and what comes of it."""
    weight = dequantize(made, dtype)
    before = weight.clone()
    noisy = add_noise_.backend(backend)(weight, made, alpha, runs, first_column)
    assert noisy.data_ptr() == weight.data_ptr()
    return noisy.float() - before.float(), noisy


# What is drawn.


def plain_words(counter, key):
    """Philox4x32-10 as published, in plain integers."""
    (a, b, c, d), k, m = counter, [key % 2**32, key >> 32], 2**32
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q // m) ^ b ^ k[0], q % m, (p // m) ^ d ^ k[1], p % m
        k = [(k[0] + 0x9E3779B9) % m, (k[1] + 0xBB67AE85) % m]
    return a, b, c, d


def plain_normal(key, row, column):
    words = plain_words((column // 4, row % 2**32, row >> 32, 1), key)
    pair = words[:2] if column % 4 < 2 else words[2:]
    one, two = (float(np.float32(np.float32(word) / 2**32 + 2**-33)) for word in pair)
    turn = math.sin if column % 2 else math.cos
    return math.sqrt(-2 * math.log(one)) * turn(2 * math.pi * two)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("row", [0, 7, 2**31, (5 << 32) + 2**32 - 2])
def test_numbers_are_those_of_the_plain_definition(key, row):
    for column in (0, 6, 2**20 + 1):
        want = [[plain_normal(key, row + i, column + j) for j in range(9)] for i in range(3)]
        # An angle is rounded to float32, which moves a number by up to 6.7 * 2.4e-7.
        got = drawn(key, row, 3, column, 9).double().cpu()
        torch.testing.assert_close(got, torch.tensor(want).double(), atol=3e-6, rtol=1e-6)


def test_a_million_numbers_are_normal_and_independent():
    rows, columns = 1000, 1000
    count = rows * columns
    x = drawn(KEYS[0], 3 << 32, rows, 40, columns).double()
    # Five standard deviations of each statistic of so many.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 5 * math.sqrt(variance / count), power
    assert 4.4 < x.abs().max() < 6.8
    # Kolmogorov and Smirnov: 2.3 is passed once in 20,000 times.
    ranks = torch.arange(1, count + 1, device=x.device) / count
    assert (torch.special.ndtr(x.flatten().sort().values) - ranks).abs().max() < 2.3 / count**0.5
    others = {
        "the row below": x.roll(1, 0),
        "the next column": x.roll(1, 1),
        "the other of two words": x.unflatten(1, (-1, 2)).flip(-1).flatten(1),
        "the next four columns": x.roll(4, 1),
        "another key": drawn(KEYS[0] ^ 1, 3 << 32, rows, 40, columns),
        "another half of the key": drawn(KEYS[0] ^ 1 << 63, 3 << 32, rows, 40, columns),
        "rows 2^32 further": drawn(KEYS[0], 4 << 32, rows, 40, columns),
    }
    for what, other in others.items():
        for mine, its in ((x, other), (x**2 - 1, other**2 - 1)):
            alike = (mine * its).mean() / (mine.std() * its.double().std())
            assert abs(alike) < 5 / math.sqrt(count / 2), what


@each_format
def test_each_group_gets_noise_of_alpha_steps(name):
    made = quantize(uneven(6, 256), FORMATS[name])
    draws = torch.stack([noise_on(made, [RowKeys(6, key)], alpha=0.5)[0] for key in range(64)])
    group = made.format.group or 256
    of_group = draws.unflatten(-1, (-1, group)).transpose(0, 1).transpose(1, 2).flatten(2)
    # 1024 numbers or more; five standard deviations.
    want = step_size(made) * 0.5
    torch.testing.assert_close(of_group.std(-1), want, rtol=5 / math.sqrt(2 * 1024), atol=0)


@each_format
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_alpha_nothing_changes_to_the_bit(name, backend):
    made = quantize(-uneven(5, 128), FORMATS[name])
    _, noisy = noise_on(made, [RowKeys(5, 1)], backend, alpha=0.0)
    want = dequantize(made, torch.float32)
    assert torch.equal(noisy.view(torch.int32), want.view(torch.int32))


# Cuts.

RUNS = [RowKeys(40, KEYS[0]), RowKeys(25, KEYS[1], 7), RowKeys(35, KEYS[2], (1 << 32) - 5)]


@functools.cache
def whole(name, backend):
    made = quantize(uneven(100, 384), FORMATS[name])
    return made, noise_on(made, RUNS, backend)[1]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    backend=st.sampled_from(BACKENDS),
    rows=st.lists(st.integers(0, 100), min_size=2, max_size=2, unique=True).map(sorted),
    columns=st.lists(st.integers(0, 384), min_size=2, max_size=2, unique=True).map(sorted),
)
def test_any_cut_draws_what_the_whole_draws_there(name, backend, rows, columns):
    (start, stop), (left, right) = rows, columns
    made, noisy = whole(name, backend)
    if made.format.group:
        left, right = left // 128 * 128, -(-right // 128) * 128
    runs, begin = [], 0
    for run in RUNS:
        first, last = max(start - begin, 0), min(stop - begin, run.rows)
        if first < last:
            runs.append(RowKeys(last - first, run.key, run.first_row + first))
        begin += run.rows
    part = made.narrow(-2, start, stop - start).narrow(-1, left, right - left)
    _, got = noise_on(part, runs, backend, first_column=left)
    assert torch.equal(got, noisy[start:stop, left:right])


def test_many_rows_draw_what_they_draw_block_by_block():
    made = quantize(normal(40, 16384), FORMATS["int8"])
    _, noisy = noise_on(made, [RowKeys(40, 3)])
    _, last = noise_on(made.narrow(-2, 33, 7), [RowKeys(7, 3, 33)])
    assert torch.equal(noisy[33:], last)


# Triton.


@needs_triton
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_draws_what_the_reference_draws(name, dtype):
    made = quantize(uneven(2, 31, 200), FORMATS[name])
    runs = [RowKeys(30, KEYS[0], 2**33), RowKeys(31, KEYS[1]), RowKeys(1, KEYS[2])]
    first = 0 if made.format.group else 7
    given = {"alpha": 0.7, "dtype": dtype, "first_column": first}
    _, got = noise_on(made, runs, "triton", **given)
    _, want = noise_on(made, runs, "reference", **given)
    # Logarithms and cosines differ in their last bits, and so does what is rounded by a hair.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    step = step_size(made).repeat_interleave(made.format.group or 200, -1)[..., :200]
    off = (got.float() - want.float()).abs()
    assert (off <= 3e-6 * step + rtol * want.float().abs() + 2**-24).all()
    assert dtype == torch.float32 or (got != want).float().mean() < 0.01


@needs_triton
def test_triton_takes_as_many_runs_as_experts_have():
    made = quantize(normal(40, 5, 32), FORMATS["nvfp4"])
    runs = [RowKeys(rows, 1000 + at) for at, rows in enumerate([2, 3] * 40)]
    got, _ = noise_on(made, runs, "triton")
    want, _ = noise_on(made, runs, "reference")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)
    empty = quantize(normal(2, 32), FORMATS["nvfp4"]).narrow(-2, 0, 0)
    assert noise_on(empty, [], "triton")[1].shape == (0, 32)


# Layers.


def test_layers_use_noisy_weights_and_their_gradient_is_of_the_same_ones():
    parts = [quantize(normal(rows, 128, seed=rows), FORMATS["nf4"]) for rows in (24, 8, 16)]
    runs = [RowKeys(part.shape[0], key) for part, key in zip(parts, KEYS, strict=True)]
    made = cat(parts)
    change = functools.partial(add_noise_, quantized=made, alpha=0.5, runs=runs)
    _, noisy = noise_on(made, runs, alpha=0.5)
    x, dy = normal(40, 128, seed=1).requires_grad_(), normal(40, 48, seed=2)
    y, want = linear(x, made, change), x @ noisy.T
    torch.testing.assert_close(y, want)
    (dx,), (expected,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(want, x, dy)
    torch.testing.assert_close(dx, expected)

    experts = quantize(normal(3, 16, 128), FORMATS["nvfp4"])
    runs = [RowKeys(16, key) for key in KEYS]
    change = functools.partial(add_noise_, quantized=experts, alpha=0.5, runs=runs)
    _, noisy = noise_on(experts, runs, alpha=0.5)
    counts, dy = torch.tensor([10, 0, 30], device=DEVICE), normal(40, 16, seed=3)
    y = group_linear(x, experts, counts, change=change)
    want = torch.cat([x[:10] @ noisy[0].T, x[10:] @ noisy[2].T])
    torch.testing.assert_close(y, want)
    (dx,), (expected,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(want, x, dy)
    torch.testing.assert_close(dx, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_makes_no_sense_is_refused(backend):
    made, run = quantize(normal(4, 128), FORMATS["nf4"]), [RowKeys(4, 1)]
    weight, add = dequantize(made), add_noise_.backend(backend)
    with pytest.raises(ValueError, match=r"weight is \(3, 128\), and quantized \(4, 128\)"):
        add(weight[:3], made, 1.0, run)
    with pytest.raises(ValueError, match=r"runs have 3 rows, and \(4, 128\) has 4"):
        add(weight, made, 1.0, [RowKeys(3, 1)])
    with pytest.raises(ValueError, match="begin at 32, and nf4 has groups of 64"):
        add(weight, made, 1.0, run, 32)
    with pytest.raises(ValueError, match="64 bits"):
        add(weight, made, 1.0, [RowKeys(4, 2**64)])
    for alpha in (-0.5, math.inf, math.nan):
        with pytest.raises(ValueError, match="alpha is"):
            add(weight, made, alpha, run)


@needs_triton
def test_triton_says_what_it_does_not_take():
    made = quantize(normal(4, 128), FORMATS["nf4"])
    with pytest.raises(UnsupportedError, match="in fp64"):
        add_noise_.backend("triton")(normal(4, 128).double(), made, 1.0, [RowKeys(4, 1)])
    with pytest.raises(UnsupportedError, match="not contiguous"):
        add_noise_.backend("triton")(normal(128, 4).T, made, 1.0, [RowKeys(4, 1)])
