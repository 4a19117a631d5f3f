"""Blocks of attention: merged, they are attention to all keys, and their gradients add up."""

import random

import pytest
import torch

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.block import Rectangle, block, block_backward, native
from penstock_kernels.op import UnsupportedError
from tests.dense import dense_with_gradients, relative_error
from tests.kernels.attention.attention_cases import HUNDRED, LENGTHS

HEADS, KV_HEADS, WIDTH = 6, 2, 16
SCALE = WIDTH**-0.5
pytestmark = pytest.mark.usefixtures("poisoned")

# fp64: rounding of a few sums. 16 bits: inputs and results are rounded, and so is what is merged.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}

# Documents of a row, and where it is cut in two: inside one, inside the only one, inside one that
# others of many lengths follow.
CUTS = [([1, 9, 3], 6), ([300], 131), ([5, 40, 1, 1, 90, 2, 3, 31], 17)]


def tensors(tokens, dtype, device):
    generator = torch.Generator().manual_seed(tokens)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    made = [torch.randn(tokens, n, WIDTH, generator=generator, dtype=torch.float64) for n in heads]
    return [part.to(device, dtype) for part in made]


def clipped(lengths, start, end):
    """The documents of tokens `start` to `end` alone."""
    document = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
    return document[start:end].unique_consecutive(return_counts=True)[1].tolist()


WINDOWS = [None, 14]
"""The second reaches over a cut from some queries, to some keys."""


def across(lengths, cut, window):
    """Keys before the cut and queries after it that see some of them, and how far these reach."""
    seen = clipped(lengths, 0, cut)[-1]
    seeing = clipped(lengths, cut, sum(lengths))[0]
    if window is None:
        return slice(cut - seen, cut), slice(0, seeing), None
    seen, seeing = min(seen, window - 1), min(seeing, window - 1)
    reach = window - 1 - seen
    return slice(cut - seen, cut), slice(0, seeing), reach if reach < seeing - 1 else None


def in_two_parts(backend, lengths, cut, dtype, device, window, **more):
    """y, dq, dk, dv of the tokens after the cut, from themselves and from those before it."""
    forward, backward = block.backend(backend), block_backward.backend(backend)
    q, k, v, dy = (part[cut:] for part in tensors(sum(lengths), dtype, device))
    _, earlier_k, earlier_v, _ = (part[:cut] for part in tensors(sum(lengths), dtype, device))
    own = VarlenMetadata.of(clipped(lengths, cut, sum(lengths)), device)
    keys, queries, reach = across(lengths, cut, window)
    size = (queries.stop, keys.stop - keys.start)
    [rectangle] = Rectangle.several([size], device, reaches=[reach])

    y, lse = forward(q, k, v, own, SCALE, window, **more)
    seen = earlier_k[keys], earlier_v[keys]
    part_y, part_lse = forward(q[queries], *seen, rectangle, SCALE, **more)
    joint = lse.clone()
    joint[queries] = torch.logaddexp(lse[queries], part_lse)
    merged = y.double() * (lse - joint).exp().unsqueeze(-1)
    merged[queries] += part_y * (part_lse - joint[queries]).exp().unsqueeze(-1)
    y = merged.to(dtype)

    dq, dk, dv = backward(dy, q, k, v, y, joint, own, SCALE, window, **more)
    dk, dv = (torch.cat((torch.zeros_like(e), d)) for e, d in ((earlier_k, dk), (earlier_v, dv)))
    part_dq, dk[keys], dv[keys] = backward(
        dy[queries],
        q[queries],
        *seen,
        y[queries],
        joint[queries],
        rectangle,
        SCALE,
        **more,
    )
    dq[queries] += part_dq
    return [part.cpu() for part in (y, dq, dk, dv)]


def check_parts_make_the_whole(backend, lengths, cut, dtype, window, device="cpu", **more):
    got = in_two_parts(backend, lengths, cut, dtype, device, window, **more)
    q, k, v, dy = (part.cpu() for part in tensors(sum(lengths), dtype, device))
    dy[:cut] = 0
    y, dq, dk, dv = dense_with_gradients(q, k, v, dy, lengths, SCALE, window, **more)
    for part, want in zip(got, (y[cut:], dq[cut:], dk, dv), strict=True):
        assert relative_error(part, want) < TOLERANCE[dtype], (backend, lengths, cut, dtype, window)


@pytest.mark.parametrize(("lengths", "cut"), CUTS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_causal_block_and_a_rectangle_make_the_whole(window, backend, dtype, lengths, cut):
    check_parts_make_the_whole(backend, lengths, cut, dtype, window)


@pytest.mark.parametrize(("lengths", "cut"), CUTS, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_capped_blocks_make_the_whole(window, lengths, cut):
    check_parts_make_the_whole("eager", lengths, cut, torch.float64, window, soft_cap=1.5)


@pytest.mark.parametrize("seeds", HUNDRED)
def test_a_hundred_random_rows_cut_in_two_make_the_whole(seeds):
    for seed in seeds:
        draw = random.Random(seed)
        lengths = [draw.choice(LENGTHS) for _ in range(draw.choice((1, 2, 4)))]
        lengths.insert(draw.randint(0, len(lengths)), draw.choice((2, 17, 37, 64, 101)))
        # Inside a document, at any of its tokens but the first.
        inside = [sum(lengths[:i]) + j for i, n in enumerate(lengths) for j in range(1, n)]
        case = lengths, draw.choice(inside), draw.choice([*TOLERANCE])
        for backend in ("eager", "sdpa"):
            check_parts_make_the_whole(backend, *case, draw.choice((None, 2, 5, 16, 33)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("lengths", "cut"), CUTS, ids=str)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("native", torch.bfloat16), ("sdpa", torch.bfloat16), ("sdpa", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("window", WINDOWS)
def test_on_cuda_they_make_the_whole_too(window, backend, dtype, lengths, cut):
    check_parts_make_the_whole(backend, lengths, cut, dtype, window, "cuda")


def test_a_backend_says_why_it_cannot_run():
    q, k, v, _ = tensors(4, torch.float32, "cpu")
    [rectangle] = Rectangle.several([(4, 3)])
    with pytest.raises(UnsupportedError, match="native: its tensors are on cpu, and it needs cuda"):
        block.backend("native")(q, k[:3], v[:3], rectangle, SCALE)
    with pytest.raises(UnsupportedError, match="there are 4 queries and 4 keys, for 4 and 3"):
        block.backend("sdpa")(q, k, v, rectangle, SCALE)


def test_what_is_called_on_cuda_fits_this_torch():
    # On the meta device: the kernels' own signatures and shapes, on a machine without one.
    q, k, v, dy = tensors(9, torch.bfloat16, "meta")
    first, second = torch.empty(2, 2, dtype=torch.int32, device="meta").unbind()
    documents = VarlenMetadata.of([9], "meta")
    for keys, sees, window in (
        (5, Rectangle(9, 5, first, second), None),
        (5, Rectangle(9, 5, first, second, reach=4), None),
        (9, documents, None),
        (9, documents, 3),
    ):
        inputs = q, k[:keys], v[:keys]
        y, lse = native.block(q, k[:keys], v[:keys], sees, SCALE, window)
        assert (y.shape, lse.shape, lse.dtype) == (q.shape, (9, HEADS), torch.float32)
        gradients = native.block_backward(dy, q, k[:keys], v[:keys], y, lse, sees, SCALE, window)
        assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in inputs]
