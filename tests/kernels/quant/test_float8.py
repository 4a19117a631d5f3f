"""Linear layers in float8: numbers and products against definitions in fp64, and torchao's."""

import math
import random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from penstock_kernels.float8 import (
    BLOCK,
    Float8Recipe,
    Float8WeightShard,
    Kind,
    Product,
    Recipe,
    amax,
    compute_scales,
    largest_of_part,
    linear,
    multiply,
    quantize,
    seen,
    shape_of_scales,
    transpose,
)
from penstock_kernels.float8.float8_matrix import spread
from penstock_kernels.float8.hadamard import factors, hadamard, turn
from penstock_kernels.op import UnsupportedError
from tests.kernels.attention.attention_cases import HUNDRED
from tests.kernels.where import DEVICE, needs_triton

pytestmark = pytest.mark.usefixtures("poisoned")

RANGE = {"e4m3": (448.0, -9, 3), "e5m2": (57344.0, -16, 2)}
"""The largest number, the exponent of the smallest, and bits of fraction."""
SHARED = ("tensor", "rows", "groups", "tiles")
SIZES = (1, 2, 7, 16, 31, 97, 127, 128, 129, 200, 256)
RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise", "blockwise")
KINDS: tuple[Kind, ...] = ("e4m3", "e5m2")

# What is summed in float32 is rounded once; interpreted, sums are cut off. Tensor cores of Hopper
# add 32 products of float8 with 14 bits.
OFF = 1e-5 if DEVICE == "cpu" else 1e-3
TOLERANCE = {torch.float32: 2 * OFF, torch.bfloat16: 1e-2}
IS_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def drawn(*shape, seed=0, dtype=torch.float32):
    """Numbers whose sizes differ by powers of ten from column to column."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.randn(shape[-1], generator=generator).clamp(-3, 3)
    return (torch.randn(shape, generator=generator) * sizes).to(DEVICE, dtype)


def rounded(number, kind):
    """The nearest number of `kind`, from its definition."""
    most, lowest, bits = RANGE[kind]
    if not number:
        return 0.0
    exponent = max(math.frexp(number)[1] - 1, lowest + bits)
    unit = 2.0 ** (exponent - bits)
    return max(-most, min(most, round(number / unit) * unit))  # halves to even


@given(st.floats(2**-100, 2**100, width=32), st.sampled_from(["e4m3", "e5m2"]))
@settings(deadline=None)
def test_a_scale_is_the_smallest_power_of_two_that_brings_a_magnitude_into_range(
    largest: float, kind: Kind
):
    scale = compute_scales(torch.tensor([[largest]]), kind).item()
    assert math.frexp(scale)[0] == 0.5
    assert largest / scale <= RANGE[kind][0] < largest / (scale / 2)


def test_what_is_not_finite_is_not_lost_and_zeros_are_zeros():
    x = torch.ones(2, 3)
    x[1, 2] = math.inf
    for bad in (math.inf, math.nan):
        x[1, 2] = bad
        made = quantize.reference(x, "e4m3", "rows")
        assert made.numbers(torch.float32)[0].tolist() == [1, 1, 1]
        assert made.numbers(torch.float32)[1].isnan().all()
    assert not quantize.reference(torch.zeros(2, 3), "e5m2", "tensor").numbers(torch.float32).any()


@pytest.mark.parametrize("kind", RANGE)
@pytest.mark.parametrize("sharing", SHARED)
def test_codes_are_the_nearest_numbers_and_are_left_alone_when_rounded_again(kind, sharing):
    x = drawn(130, 140)
    made = quantize.reference(x, kind, sharing)
    numbers = made.numbers(torch.float32)
    scales = spread(made.scales, sharing, *x.shape).expand_as(x).cpu()
    for row, column in ((0, 0), (3, 129), (127, 5), (128, 128), (129, 139)):
        scale = scales[row, column].item()
        want = rounded(x[row, column].item() / scale, kind) * scale
        assert numbers[row, column].item() == want
    assert torch.equal(quantize.reference(numbers, kind, sharing).numbers(torch.float32), numbers)
    assert torch.equal(made.numbers(torch.bfloat16).float(), numbers)


def test_the_largest_of_parts_make_the_largest_of_the_whole():
    # Of rows that grow, the maximum of a tile is in its last row.
    x = drawn(300, 140) * 1.3 ** torch.arange(300)[:, None]
    for sharing in SHARED:
        parts, first = [], 0
        for rows in (1, 0, 150, 149):
            part = x[first : first + rows]
            parts.append(largest_of_part(part, sharing, first, len(x)))
            first += rows
        assert torch.equal(torch.stack(parts).amax(0), amax(x, sharing)), sharing


@needs_triton
@pytest.mark.parametrize("seeds", HUNDRED)
def test_kernels_round_as_the_reference_does_to_the_bit(seeds):
    run = quantize.backend("triton")
    for seed in seeds:
        draw = random.Random(seed)
        shape = draw.choice(SIZES), draw.choice(SIZES)
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        sharing, kind = SHARED[seed % 4], draw.choice(KINDS)
        x = drawn(*shape, seed=seed).clamp(-6e4, 6e4).to(dtype)
        x = x.mT if draw.random() < 0.4 else x
        scales = None
        if draw.random() < 0.3:
            scales = compute_scales(2 * amax(x, sharing).clamp(min=1e-9), kind)
        want = quantize.reference(x, kind, sharing, scales)
        got = run(x, kind, sharing, scales)
        assert torch.equal(got.scales, want.scales), (seed, sharing)
        ours, theirs = (each.codes.view(torch.uint8) for each in (got, want))
        assert torch.equal(ours, theirs), (seed, sharing, kind)


@needs_triton
def test_codes_are_transposed():
    draw = random.Random(0)
    for _ in range(100):
        codes = quantize.reference(drawn(draw.choice(SIZES), draw.choice(SIZES)), "e5m2", "tensor")
        got = transpose.backend("triton")(codes.codes)
        assert got.dtype == codes.codes.dtype
        assert torch.equal(got.view(torch.uint8), codes.codes.mT.contiguous().view(torch.uint8))


PAIRS = [
    ("scaled", "tensor", "tensor"),
    ("scaled", "rows", "rows"),
    *(
        pytest.param(
            *("scaled", "groups", other),
            marks=pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU"),
        )
        for other in ("groups", "tiles")
    ),
    pytest.param("triton", "groups", "tiles", marks=[needs_triton, pytest.mark.slow]),
    pytest.param("triton", "groups", "groups", marks=[needs_triton, pytest.mark.slow]),
]


@pytest.mark.parametrize(("backend", "left", "right"), PAIRS)
def test_products_are_exact_ones_rounded_at_random_shapes(backend, left, right):
    draw = random.Random(backend + right)
    run = multiply.backend(backend)
    kinds = [("e4m3", "e4m3"), ("e5m2", "e4m3")]
    wide = (16, 32, 48, 128, 144, 256) if backend == "scaled" else (0, *SIZES[:9])
    for seed in range(100 if backend == "scaled" else 50):
        M, N, K = draw.choice(SIZES[:9]), draw.choice(wide), draw.choice(SIZES)
        kind = kinds[seed % 2]
        dtype = draw.choice(list(TOLERANCE))
        if DEVICE == "cuda" and left in ("rows", "groups") and backend == "scaled":
            dtype = torch.bfloat16
        if backend == "scaled" and left == "groups":
            M, N = -(-M // 16) * 16, draw.choice((144, 256, 272))
            K = draw.choice((1, 2, 5)) * (512 if right == "tiles" else 128)
            kind = "e4m3", "e4m3"
        a = quantize.reference(drawn(M, K, seed=seed), kind[0], left)
        b = quantize.reference(drawn(N, K, seed=seed + 1), kind[1], right)
        got = run(a, b, dtype)
        left_numbers, right_numbers = (each.numbers(torch.float32).double() for each in (a, b))
        want = left_numbers @ right_numbers.mT
        sizes = left_numbers.abs() @ right_numbers.abs().mT
        assert got.dtype == dtype
        assert got.shape == (M, N)
        assert ((got.double() - want).abs() <= TOLERANCE[dtype] * sizes).all(), (M, N, K)


def test_products_that_cannot_be_are_refused():
    a = quantize.reference(drawn(4, 32), "e4m3", "rows")
    b = quantize.reference(drawn(16, 48), "e4m3", "rows")
    tiles = quantize.reference(drawn(16, 32), "e4m3", "tiles")
    for backend, one, other, reason in (
        ("scaled", a, b, "matrices are"),
        ("scaled", a, tiles, "no scales of rows by tiles"),
        ("triton", a, tiles, "reach beyond 128"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            multiply.backend(backend)(one, other, torch.float32)
    with pytest.raises(UnsupportedError, match=r"scales of tiles are \(1, 1\)"):
        quantize.backend("triton")(drawn(4, 32), "e4m3", "tiles", torch.ones(4, 1))
    with pytest.raises(ValueError, match="48 columns are not whole blocks of 32"):
        linear(drawn(4, 48), drawn(16, 48), Float8Recipe(block=32))
    with pytest.raises(ValueError, match="x is"):
        linear(drawn(4, 32), drawn(16, 48), Float8Recipe())


# The layer.


def computed(x, weight, scheme, dy):
    """Outputs and gradients."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    y = linear(x, weight, scheme)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def sized(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", [None, 32])
def test_every_product_of_a_layer_is_of_rounded_numbers(recipe, block):
    T, K, N = 150, 160, 144
    x, weight, dy = drawn(T, K), drawn(N, K, seed=1), drawn(T, N, seed=2)
    x, weight, dy = x / x.norm(), weight / weight.norm(), dy / dy.norm()
    turned = [x, weight] if block is None else [turn(x, block, 2**-2), turn(weight, block, 2**-3)]
    of_rows, of_weights = {
        "tensorwise": ("tensor", "tensor"),
        "rowwise": ("rows", "rows"),
        "blockwise": ("groups", "tiles"),
    }[recipe]

    def numbers(matrix, kind, sharing):
        return quantize.reference(matrix, kind, sharing).numbers(torch.float32).double()

    def back(matrix, factor):
        return matrix if block is None else turn(matrix, block, factor)

    by_x, by_weight = numbers(turned[0], "e4m3", of_rows), numbers(turned[1], "e4m3", of_weights)
    want = {
        "y": by_x @ by_weight.mT,
        "dx": back(
            numbers(dy, "e5m2", of_rows) @ numbers(turned[1].mT, "e4m3", of_weights).mT, 2**-2
        ),
        "dx exact": back(dy.double() @ by_weight, 2**-2),
        "dw": back(
            numbers(dy.mT, "e5m2", of_rows) @ numbers(turned[0].mT, "e4m3", of_rows).mT, 2**-3
        ),
        "dw exact": dy.double().mT @ x.double(),
    }
    for kind in get_args(Product):
        more = "" if kind == "quantized" else " exact"
        y, dx, dweight = computed(x, weight, Float8Recipe(recipe, "e5m2", kind, kind, block), dy)
        for got, name in ((y, "y"), (dx, "dx" + more), (dweight, "dw" + more)):
            assert sized(got, want[name]) < OFF, name
    plain = x @ weight.mT, dy @ weight, dy.mT @ x
    for got, exact in zip(computed(x, weight, Float8Recipe(recipe), dy), plain, strict=True):
        assert sized(got, exact) < 0.1
    e4m3 = computed(x, weight, Float8Recipe(recipe, "e4m3"), dy)
    e5m2 = computed(x, weight, Float8Recipe(recipe), dy)
    assert sized(e4m3[1], plain[1]) < 0.8 * sized(e5m2[1], plain[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning:torchao.*")
def test_layers_are_those_of_torchao_to_the_bit():
    float8 = pytest.importorskip("torchao.float8")
    from dataclasses import replace

    x, dy = (drawn(48, n, seed=n, dtype=torch.bfloat16) for n in (64, 32))
    base = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16, device=DEVICE)
    for name, scheme in (
        ("tensorwise", Float8Recipe("tensorwise", "e5m2")),
        ("rowwise", Float8Recipe("rowwise", "e4m3")),
        ("rowwise_with_gw_hp", Float8Recipe("rowwise", "e4m3", weight_gradient="exact")),
    ):
        config = float8.Float8LinearConfig.from_recipe_name(name)
        config = replace(config, round_scales_to_power_of_2=True)
        theirs = float8.float8_linear.Float8Linear.from_float(base, config)
        leaf = x.clone().requires_grad_()
        y = theirs(leaf)
        slopes = torch.autograd.grad(y, (leaf, theirs.weight), dy)
        got = computed(x, base.weight, scheme, dy)
        for mine, other in zip(got, (y, *slopes), strict=True):
            assert torch.equal(mine, other), name


def test_turning_twice_is_the_identity_and_shares_out_what_stands_out():
    for block in (16, 32, 64, 128):
        matrix = hadamard(block, torch.device("cpu"), torch.float64)
        assert torch.equal(matrix @ matrix.mT, block * torch.eye(block, dtype=torch.float64))
        one, other = factors(block)
        x = torch.randn(3, 2 * block, dtype=torch.float64)
        torch.testing.assert_close(turn(turn(x, block, one), block, other), x)
        x[:, 1] = 1e3
        assert turn(x, block, block**-0.5)[:, :block].abs().max() < 1.1e3 / block**0.5 + 20


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_of_codes_alone_serves_as_the_weight_does(recipe):
    x, dy = drawn(40, 160), drawn(40, 144, seed=2)
    for block in (None, 32):
        # Rounded by the columns of its rows, it has no scales for the columns themselves.
        kind = "exact" if recipe == "rowwise" else "quantized"
        scheme = Float8Recipe(recipe, "e5m2", kind, "quantized", block)
        weight = drawn(144, 160, seed=1).requires_grad_()
        y, dx, dweight = computed(x, weight, scheme, dy)
        made = quantize(seen(weight.detach(), block), "e4m3", scheme.of_weights)
        alone = Float8WeightShard(made, block, torch.float32).requires_grad_()
        leaf = x.clone().requires_grad_()
        got = linear(leaf, alone, scheme)
        slopes = torch.autograd.grad(got, (leaf, alone), dy)
        for mine, other in zip((got, *slopes), (y, dx, dweight), strict=True):
            assert torch.equal(mine, other)
        assert sized(alone.detach() + 0, weight.detach()) < 0.04


@needs_triton
@pytest.mark.slow
def test_pytorch_finds_no_fault_with_the_operators():
    x, weight = drawn(5, 130), drawn(16, 130, seed=1)
    torch_ops = torch.ops.penstock
    opcheck(torch_ops.float8_quantize.default, (x.mT, "e5m2", "groups", None))
    a = quantize.reference(x, "e5m2", "groups")
    b = quantize.reference(weight, "e4m3", "tiles")
    codes = (each.codes.view(torch.uint8) for each in (a, b))
    more = ("e5m2", "e4m3", "b", torch.bfloat16)
    opcheck(torch_ops.float8_multiply.default, (*codes, a.scales, b.scales, *more))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    opcheck(torch_ops.float8_linear.default, (x, weight, "rowwise e4m3 quantized exact", 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["rowwise", *(pytest.param(r, marks=pytest.mark.exhaustive) for r in RECIPES[::2])],
)
def test_a_layer_is_compiled_as_one_graph(recipe):
    x, weight, dy = drawn(40, 160), drawn(144, 160, seed=1), drawn(40, 144, seed=2)
    scheme = Float8Recipe(recipe, block=32)
    want = computed(x, weight, scheme, dy)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, weight):
        return linear(x, weight, scheme)

    leaf, learnt = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = compiled(leaf, learnt)
    y.backward(dy)
    for got, expected in zip((y, leaf.grad, learnt.grad), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_shapes_of_scales_are_of_whole_blocks():
    assert shape_of_scales("tiles", BLOCK + 1, BLOCK) == (2, 1)
    assert shape_of_scales("groups", 3, 2 * BLOCK + 1) == (3, 3)
