"""newton_schulz: singular values by their own arithmetic, torch's Muon, Triton, many shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kernels.newton_schulz import COEFFICIENTS, each_by_shape, newton_schulz
from tests.kernels.quant.matrices import normal
from tests.kernels.where import CAN_RUN_TRITON, DEVICE

FAST = ["batched", "triton"] if CAN_RUN_TRITON else ["batched"]
pytestmark = pytest.mark.usefixtures("poisoned")
# Tall, wide, square, of one row, primes, and of several tiles, some off the diagonal.
SHAPES = [(1, 1), (1, 40), (7, 3), (64, 64), (31, 97), (3, 20, 50), (2, 2, 50, 20), (131, 140)]


def by_singular_values(matrix, steps):
    """In fp64: each singular value goes its own way, and vectors stay."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ (s[..., None] * vh), s


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_grow_as_the_polynomial_says_and_vectors_stay(shape, backend):
    matrix = normal(*shape, scale=3.0)
    got = newton_schulz.backend(backend)(matrix)
    want, values = by_singular_values(matrix, 5)
    assert got.dtype == torch.bfloat16
    assert got.shape == matrix.shape
    # Rounded to 8 bits three times a step, of which a value's growth makes up to 3.4 times as much.
    off = (got.double() - want).flatten(-2).norm(dim=-1) / values.norm(dim=-1)
    assert (off < 0.06).all(), off


@pytest.mark.slow
@pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs CUDA or Triton's interpreter")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    stack=st.integers(0, 2),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_all_are_as_near_to_fp64_for_any_shape(stack, rows, columns, dtype):
    matrix = normal(stack, rows, columns, seed=rows, scale=1.0).to(dtype)
    want, values = by_singular_values(matrix.bfloat16(), 1)
    for backend in newton_schulz.backends[1:]:
        got = newton_schulz.backend(backend)(matrix, 1).double()
        off = (got - want).flatten(1).norm(dim=1) / values.norm(dim=-1)
        # A single row has one singular value, and all of the rounding in it.
        assert (off < 0.05).all(), (backend, off)


def test_large_and_small_singular_values_come_to_lie_near_one():
    u, _, v = torch.linalg.svd(normal(48, 80))
    spread = torch.logspace(0, -2, 48, device=u.device)
    found = torch.linalg.svdvals(newton_schulz((u * spread) @ v[:48]).double())
    assert found.min() > 0.6
    assert found.max() < 1.3


@pytest.mark.skipif(DEVICE != "cpu", reason="torch's sums are in another order on a GPU")
def test_a_step_of_muon_is_torchs():
    # Torch's own optimizer as the oracle: a step of it, made of ours.
    weight = normal(40, 24, scale=0.5)
    gradient = normal(40, 24, seed=1)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([parameter], lr=0.1, weight_decay=0.1, momentum=0.95)
    parameter.grad = gradient.clone()
    optimizer.step()
    moment = 0.05 * gradient
    update = newton_schulz.backend("batched")(gradient.lerp(moment, 0.95))
    want = weight * (1 - 0.1 * 0.1) - 0.1 * (40 / 24) ** 0.5 * update.float()
    torch.testing.assert_close(parameter.detach(), want, rtol=0, atol=1e-6)


def test_the_published_vector():
    # One step of Muon with lr 0.1, decay 0.1, momentum 0.95 and Nesterov's, as torch computes it.
    weight = torch.tensor([[0, 0.1, 0.2], [0.3, 0.4, 0.5]], device=DEVICE)
    gradient = torch.tensor([[1.0, 2, 3], [4, 5, 7]], device=DEVICE)
    update = newton_schulz(gradient.lerp(0.05 * gradient, 0.95))
    found = weight * 0.99 - 0.1 * update.float()
    want = [
        [0.06367187947, 0.07956640422, 0.14409375191],
        [0.24153126776, 0.36377343535, 0.45925781131],
    ]
    torch.testing.assert_close(found.cpu(), torch.tensor(want), rtol=0, atol=1e-7)


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_no_step_only_scales_and_zeros_stay(backend):
    compute = newton_schulz.backend(backend)
    matrix = normal(2, 9, 5)
    want = matrix.bfloat16()
    want = want / want.flatten(1).norm(dim=1)[:, None, None]
    torch.testing.assert_close(compute(matrix, 0), want)
    assert not compute(torch.zeros(3, 4, 6, device=DEVICE)).any()
    for shape in ((0, 4, 6), (0, 6), (6, 0)):
        assert compute(torch.ones(shape, device=DEVICE)).shape == shape


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=12),
    together=st.sampled_from([1, 40, 1 << 20]),
)
def test_matrices_of_a_shape_are_computed_together_and_each_by_itself(shapes, together):
    calls = []

    def compute(stack):
        assert stack.shape[-2] <= stack.shape[-1]
        assert len(stack) == 1 or stack.numel() <= together
        calls.append(tuple(stack.shape[-2:]))
        return stack * 2 + stack.square().sum((-2, -1), keepdim=True)

    matrices = [normal(*shape, seed=at, scale=1.0) for at, shape in enumerate(shapes)]
    found = each_by_shape(matrices, compute, together)
    assert len(found) == len(matrices)
    for got, matrix in zip(found, matrices, strict=True):
        torch.testing.assert_close(got, matrix * 2 + matrix.square().sum())
    if together == 1 << 20:
        assert len(calls) == len({tuple(sorted(shape)) for shape in shapes})


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"\(4,\) is no matrix"):
        newton_schulz(normal(4))
    with pytest.raises(ValueError, match="-1 steps are less than none"):
        newton_schulz(normal(4, 4), -1)
