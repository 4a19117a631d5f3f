"""dropout: its meaning, Triton against the reference."""

import random

import pytest
import torch

from penstock_kernels.dropout import dropout
from penstock_kernels.dropout.reference import keep_mask
from penstock_kernels.op import INTERPRETED, UnsupportedError
from tests.kernels.where import DEVICE, needs_triton
from tests.turns import hundred

KEY = 0xF00DFACE_89ABCDEF
pytestmark = pytest.mark.usefixtures("poisoned")
# Far apart, so that all their words differ, and one of padding.
PLACES = torch.tensor([0, 1, (7 << 32) + 3, (2**31 - 1 << 32) + 2**32 - 1, -1], device=DEVICE)


def forward_backward(operation, x, dy, *draws):
    x = x.clone().requires_grad_()
    y = operation(x, *draws)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def randoms(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2)]


@needs_triton
# The interpreter cuts numbers off for bf16 where a GPU rounds them.
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 0), (torch.bfloat16, 2**-7 if INTERPRETED else 0)], ids=str
)
@pytest.mark.parametrize(
    ("features", "first"), [(1, 0), (37, 6), (1100, 2**31 - 2000)], ids=["one", "some", "many"]
)
def test_triton_drops_what_the_reference_drops_to_the_bit(features, first, dtype, rtol):
    x, dy = randoms(len(PLACES), features, dtype=dtype)
    for rate, key in ((0.1, KEY), (0.7, 5)):
        draws = PLACES, rate, key, first
        got = forward_backward(dropout.backend("triton"), x, dy, *draws)
        want = forward_backward(dropout.reference, x, dy, *draws)
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine == 0, theirs == 0)
            torch.testing.assert_close(mine, theirs, atol=0, rtol=rtol)


SIZES = (0, 1, 2, 3, 4, 7, 16, 31, 97, 129)


@needs_triton
@pytest.mark.parametrize("seeds", hundred(12))
def test_triton_drops_alike_at_any_shape_and_place(seeds):
    for seed in seeds:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        shape = draw.choice(SIZES[:4]), draw.choice((*SIZES, 1025))
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        x, dy = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
        places = torch.randint(-1, 2**62, shape[:1], generator=generator).to(DEVICE)
        draws = (
            places,
            draw.choice((0.0, 0.1, 0.5, 0.999)),
            draw.getrandbits(64),
            draw.randint(0, 9),
        )
        found = forward_backward(dropout.backend("triton"), x, dy, *draws)
        stays = keep_mask(places, shape[1], draws[1], *draws[2:])
        for mine, given in zip(found, (x, dy), strict=True):
            assert mine.dtype == dtype
            exact = torch.where(stays, given.double() / (1 - draws[1]), 0)
            # Rounded once; the interpreter cuts off, for bf16.
            rtol = {torch.float32: 2e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            torch.testing.assert_close(mine.double(), exact, atol=0, rtol=rtol)


def test_what_is_kept_is_scaled_and_its_gradient_alike():
    x, dy = randoms(5, 64)
    y, dx = forward_backward(dropout, x, dy, PLACES, 0.25, KEY)
    stays = keep_mask(PLACES, 64, 0.25, KEY)
    assert 0 < stays.sum() < stays.numel()
    torch.testing.assert_close(y, torch.where(stays, x / 0.75, 0), atol=0, rtol=1e-6)
    torch.testing.assert_close(dx, torch.where(stays, dy / 0.75, 0), atol=0, rtol=1e-6)


def test_tokens_and_features_draw_alike_wherever_they_are():
    x, _ = randoms(5, 64)
    whole = dropout(x, PLACES, 0.5, KEY)
    order = torch.tensor([3, 0, 4], device=DEVICE)
    assert torch.equal(dropout(x[order], PLACES[order], 0.5, KEY), whole[order])
    for first, last in ((0, 32), (13, 64), (30, 33)):
        part = dropout(x[:, first:last], PLACES, 0.5, KEY, first)
        assert torch.equal(part, whole[:, first:last])


def test_as_much_is_dropped_as_asked_and_other_keys_places_and_features_drop_apart():
    rate, tokens, features = 0.3, 200, 250
    places = torch.arange(tokens) + (5 << 32)
    masks = [keep_mask(places, features, rate, key) for key in (KEY, KEY ^ 1)]
    others = (
        masks[1],
        masks[0].roll(1, 0),
        masks[0].roll(1, 1),
        keep_mask(places + (1 << 32), features, rate, KEY),
    )
    # Five standard deviations of so many draws.
    spread = 5 * (rate * (1 - rate) / (tokens * features)) ** 0.5
    assert abs(1 - masks[0].double().mean() - rate) < spread
    alike = rate**2 + (1 - rate) ** 2
    spread = 5 * (alike * (1 - alike) / (tokens * features)) ** 0.5
    for other in others:
        assert abs((masks[0] == other).double().mean() - alike) < spread


def test_what_makes_no_sense_is_refused():
    x, _ = randoms(5, 8)
    with pytest.raises(ValueError, match=r"the rate is 1\.0"):
        dropout.reference(x, PLACES, 1.0, KEY)
    with pytest.raises(ValueError, match=r"\(4,\) places for x of \(5, 8\)"):
        dropout(x, PLACES[:4], 0.5, KEY)


@needs_triton
def test_triton_says_what_it_does_not_take():
    x, _ = randoms(5, 8, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="x is in fp64"):
        dropout.backend("triton")(x, PLACES, 0.5, KEY)
    with pytest.raises(UnsupportedError, match=r"its places are \(4,\)"):
        dropout.backend("triton")(x.float(), PLACES[:4], 0.5, KEY)
