"""Quantizing: codes and numbers against published vectors and plain definitions; Triton."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kernels.op import UnsupportedError
from penstock_kernels.quant import (
    FORMATS,
    dequantize,
    get_format,
    matmul,
    quantize,
)
from tests.kernels.quant.matrices import normal, same, uneven
from tests.kernels.where import DEVICE, needs_triton

each_format = pytest.mark.parametrize("name", FORMATS)
pytestmark = pytest.mark.usefixtures("poisoned")

NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


# The published vectors.


def test_nvfp4_gives_the_codes_scales_and_numbers_of_the_published_vectors():
    rows = [
        [0.1 * (i - 8) for i in range(16)],
        [0.01 * (i + 1) * (-1) ** i for i in range(16)],
    ]
    made = quantize.reference(torch.tensor(rows), FORMATS["nvfp4"])
    assert made.codes.tolist() == [
        [255, 238, 205, 171, 32, 67, 101, 118],
        [161, 178, 196, 213, 229, 230, 246, 247],
    ]
    assert made.scales.float().tolist() == [[448], [88]]
    assert made.tensors["global_scales"].unique().tolist() == [0.00029761905898340046]
    below = [-0.80078125, -0.80078125, -0.53515625, -0.53515625]
    below += [-0.400390625, -0.267578125, -0.2001953125, -0.1337890625]
    above = [0.1337890625, 0.2001953125, 0.267578125, 0.400390625]
    above += [0.53515625, 0.53515625, 0.80078125]
    assert dequantize.reference(made)[0].tolist() == [*below, 0, *above]


MIDDLES = [(low + high) / 2 for low, high in pairwise(NF4)]
# Numbers between two of a format, and where they go; first the largest, so that a scale is 1.
TIES = {
    "mxfp4": ([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], [6, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "nvfp4": ([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], [6, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "nf4": ([1, *MIDDLES], [1, *NF4[:-1]]),
    "int4": ([7, 0.5, 1.5, 2.5, 5.5, 6.5], [7, 0, 2, 2, 6, 6]),
    "int8": ([127, 0.5, 1.5, 2.5, 125.5, 126.5], [127, 0, 2, 2, 126, 126]),
    "fp8": ([448, 17, 19, 432, 5 * 2**-10, 2**-10], [448, 16, 20, 448, 4 * 2**-10, 0]),
    "block_fp8": (
        [448, 17, 19, 400, 432, 5 * 2**-10, 7 * 2**-10, 2**-10, 15 * 2**-10],
        [448, 16, 20, 384, 448, 4 * 2**-10, 8 * 2**-10, 0, 2**-6],
    ),
}


@each_format
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_triton)])
def test_ties_go_where_the_format_says(name, backend):
    between, wanted = (torch.tensor([row], device=DEVICE) for row in TIES[name])
    if name != "nf4":
        between, wanted = (torch.cat([row, -row], -1) for row in (between, wanted))
    made = quantize.backend(backend)(between.float(), FORMATS[name])
    numbers = dequantize.backend(backend)(made, torch.float32)
    torch.testing.assert_close(numbers, wanted.float(), rtol=1e-6, atol=0)


def test_nvfp4_codes_are_those_of_the_published_formula_in_float32():
    weight = normal(512, 512).bfloat16()
    x = weight.float().cpu().numpy().reshape(-1, 16)
    scaled = np.abs(x * (np.float32(6) / np.abs(x).max(-1, keepdims=True)))
    sizes = np.where(
        scaled >= 1.75,
        4 + (scaled >= 2.5) + (scaled >= 3.5) + (scaled >= 5.0),
        np.minimum((2 * scaled + np.float32(0.5)).astype(int), 3),
    )
    codes = (sizes + 8 * (x < 0)).reshape(512, 256, 2)
    packed = torch.from_numpy(codes[..., 0] + 16 * codes[..., 1]).to(DEVICE)
    assert torch.equal(quantize(weight, FORMATS["nvfp4"]).codes.long(), packed)


def test_nf4_gives_the_codes_of_the_published_vector():
    made = quantize.reference(torch.linspace(-3.2, 3.1, 64)[None], FORMATS["nf4"])
    assert made.codes[0].tolist() == [
        *(0, 0, 16, 17, 17, 17, 33, 34, 34, 51, 51, 68, 84, 85, 102, 118),
        *(119, 136, 153, 169, 170, 187, 203, 204, 220, 221, 237, 238, 238, 238, 255, 255),
    ]
    assert made.scales[0].tolist() == pytest.approx([3.2])


@pytest.mark.parametrize(
    ("name", "error", "size"),
    [
        ("nf4", 0.0921, 0.30),
        ("nvfp4", 0.0977, 0.30),
        ("mxfp4", 0.1145, 0.27),
        ("fp8", 0.0265, 0.51),
        ("block_fp8", 0.0265, 0.52),
        ("int8", 0.0085, 0.51),
        ("int4", 0.12, 0.27),
    ],
)
def test_normal_weights_lose_no_more_than_published_and_shrink_as_much(name, error, size):
    weight = normal(1024, 1024)
    made = quantize(weight, FORMATS[name])
    assert (dequantize(made).float() - weight).norm() / weight.norm() <= error
    assert made.num_bytes <= size * weight.numel() * 2


# Plain definitions: what each format means, number by number.


def e4m3_numbers():
    """All that are not negative: 1 + 4 bits of exponent + 3 of fraction, without infinities."""
    normal_ones = [
        Fraction(8 + m) * Fraction(2) ** (e - 10) for e in range(1, 16) for m in range(8)
    ]
    return [float(Fraction(m, 512)) for m in range(8)] + [float(x) for x in normal_ones[:-1]]


E4M3 = np.array(e4m3_numbers())


def nearest(x, grid):
    """The number of the nearest in a sorted grid; of two the one with the even number."""
    grid = np.asarray(grid, dtype=np.float64)
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = x - grid[above - 1], grid[above] - x
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return np.where(up, above, above - 1)


def plain(weight, name):
    """float64 [N, K]: what a matrix is after it was quantized, and how far apart numbers lie."""
    x = weight.double().cpu().numpy()
    y, gap = np.zeros_like(x), np.zeros_like(x)
    N, K = x.shape
    tall, wide = {
        "nf4": (1, 64),
        "nvfp4": (1, 16),
        "mxfp4": (1, 32),
        "int4": (1, 128),
        "int8": (1, K),
        "fp8": (1, K),
        "block_fp8": (128, 128),
    }[name]
    for row in range(0, N, tall):
        for column in range(0, K, wide):
            at = np.s_[row : row + tall, column : column + wide]
            most = max(np.abs(x[at]).max(), 1e-12)
            if name == "nf4":
                y[at] = np.array(NF4)[nearest(x[at] / most, NF4)] * most
                gap[at] = 0.31 * most
            elif name == "nvfp4":
                of_all = max(np.abs(x).max(), 1e-12)
                scale = E4M3[nearest(most / of_all * 448, E4M3)] * of_all / (6 * 448)
                size = np.array(E2M1)[nearest(np.abs(x[at]) * 6 / most, E2M1)]
                y[at] = np.sign(x[at]) * size * scale
                gap[at] = 2 * scale
            elif name == "mxfp4":
                scale = 2.0 ** (np.floor(np.log2(most)) - 2)
                size = np.array(E2M1)[nearest(np.abs(x[at]) / scale, E2M1)]
                y[at] = np.sign(x[at]) * size * scale
                gap[at] = 2 * scale
            elif name in ("fp8", "block_fp8"):
                scale = max(most / 448, 1e-12)
                size = E4M3[nearest(np.abs(x[at]) / scale, E4M3)]
                y[at] = np.sign(x[at]) * size * scale
                gap[at] = 2.0**-3 * size * scale + scale / 512
            else:
                scale = most / {"int8": 127, "int4": 7}[name]
                y[at] = np.rint(x[at] / scale) * scale
                gap[at] = scale
    return y, gap


@each_format
@pytest.mark.parametrize("shape", [(130, 258), (3, 16), (5, 70)], ids=str)
def test_numbers_are_those_of_the_plain_definition(name, shape):
    weight = uneven(*shape)
    got = dequantize.reference(quantize.reference(weight, FORMATS[name]), torch.float32)
    want, gap = plain(weight, name)
    off = np.abs(got.double().cpu().numpy() - want)
    ties = off > 1e-6 * np.abs(want) + 1e-18
    # Which side of a tie float32 falls on is its own matter: rare, and never further.
    assert ties.mean() < 1e-3
    assert (off <= gap * 1.001 + 1e-18)[ties].all()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
)
def test_no_number_moves_further_than_its_format_lets_it(name, numbers):
    weight = torch.tensor([numbers])
    got = dequantize(quantize(weight, FORMATS[name]), torch.float32)
    most = weight.abs().max().item()
    # Half of the widest gap between levels, where the largest is 1; e4m3 scales are off themselves.
    half = {"nf4": 0.152, "nvfp4": 1 / 6 + 1 / 16, "int4": 1 / 14, "int8": 1 / 254, "mxfp4": 1 / 4}
    bound = half.get(name, 1 / 28) * most + 1e-11
    assert (got - weight).abs().max().item() <= bound * (1 + 1e-5)


# Triton.


@needs_triton
@each_format
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 131, 40), torch.float32),
        ((3, 600), torch.bfloat16),
        ((2, 17), torch.float16),
    ],
    ids=str,
)
def test_triton_and_the_reference_agree_to_the_bit(name, shape, dtype):
    weight = uneven(*shape).to(dtype)
    made = quantize.reference(weight, FORMATS[name])
    same(quantize.backend("triton")(weight, FORMATS[name]), made)
    for kept in (torch.float32, torch.bfloat16, torch.float16):
        got, want = dequantize.backend("triton")(made, kept), dequantize.reference(made, kept)
        assert got.dtype == want.dtype == kept
        assert torch.equal(got, want)


@needs_triton
@pytest.mark.parametrize(("name", "group"), [("nf4", 16), ("nf4", 1024), ("int4", 32)])
def test_triton_has_groups_of_other_sizes(name, group):
    weight, kept = uneven(3, 130), get_format(name, group)
    made = quantize.reference(weight, kept)
    assert made.scales.shape == (3, math.ceil(130 / group))
    same(quantize.backend("triton")(weight, kept), made)
    assert torch.equal(dequantize.backend("triton")(made), dequantize.reference(made))


@needs_triton
@each_format
@pytest.mark.parametrize(
    ("rows", "dtype", "rtol"), [(1, torch.float32, 1e-5), (17, torch.bfloat16, 2**-8)], ids=str
)
def test_a_product_of_few_rows_is_that_of_the_dequantized_matrix(name, rows, dtype, rtol):
    if DEVICE == "cuda" and dtype == torch.float32:
        pytest.skip("on a GPU Triton multiplies rows of 16 bits alone")
    made = quantize(normal(37, 200), FORMATS[name])
    x = normal(rows, 200, seed=1, scale=1.0).to(dtype)
    y = matmul.backend("triton")(x, made)
    want = x.double() @ dequantize.reference(made, dtype).double().T
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=rtol, atol=1e-6)


@needs_triton
def test_triton_says_what_it_does_not_take():
    made = quantize(normal(4, 128), FORMATS["nf4"])
    with pytest.raises(UnsupportedError, match="x has 65 rows"):
        matmul.backend("triton")(normal(65, 128), made)
    with pytest.raises(UnsupportedError, match=r"the matrix \(4, 128\)"):
        matmul.backend("triton")(normal(3, 64), made)
    wide = quantize(normal(4, 256), get_format("nf4", 256))
    with pytest.raises(UnsupportedError, match="groups of 256"):
        matmul.backend("triton")(normal(3, 256), wide)
    with pytest.raises(UnsupportedError, match=r"it gives no torch\.float64"):
        dequantize.backend("triton")(made, torch.float64)
    with pytest.raises(ValueError, match="not finite"):
        quantize.backend("triton")(normal(2, 64) * float("nan"), FORMATS["nf4"])
