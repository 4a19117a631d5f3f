"""group_gemm: every implementation against products in float64, one row at a time."""

import random
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from penstock_kernels.group_gemm import group_gemm, quack
from penstock_kernels.group_gemm.loops import padded_height
from penstock_kernels.group_gemm.zeroing import zero_empty, zero_tail_rows
from penstock_kernels.op import UnsupportedError
from tests.kernels.where import DEVICE, needs_triton
from tests.turns import todays

BACKENDS = ["eager", "native", pytest.param("triton", marks=needs_triton)]
pytestmark = pytest.mark.usefixtures("poisoned")

# fp32: sums of some dozens of products. 16 bits: one rounding of the result, or one truncation in
# Triton's interpreter.
TOLERANCE = {
    torch.float32: (2e-5, 1e-5),
    torch.bfloat16: (1e-3, 8e-3),
    torch.float16: (1e-3, 2e-3),
}

INTEGERS = [torch.int32, torch.int64]

# Rows of each group, rows past them, K, N, dtype, how the weight is kept. In the interpreter tiles
# are 16 x 16, and rows of whole 16 bytes are copied by tensor descriptors.
CASES = {
    "groups-without-rows": ([3, 0, 5, 0], 0, 16, 24, torch.float32, "GNK"),
    "one-group-has-all": ([0, 35, 0], 0, 24, 16, torch.bfloat16, "GNK"),
    "one-row-in-all": ([0, 0, 1], 0, 16, 16, torch.float32, "GKN"),
    "no-rows": ([0, 0], 0, 16, 16, torch.float32, "GNK"),
    "rows-past-the-groups": ([4, 0, 18], 21, 24, 40, torch.float32, "GKN"),
    "rows-past-no-groups-at-all": ([0, 0], 5, 16, 16, torch.bfloat16, "GNK"),
    "edges-of-tiles": ([16, 17, 15, 1], 1, 40, 24, torch.float16, "GKN"),
}
ODD = {
    "odd-widths": ([7, 0, 19], 3, 13, 21, torch.float32, "GNK"),
    "odd-widths-transposed": ([7, 0, 19], 3, 21, 13, torch.bfloat16, "GKN"),
}


def in_float64(x, weight, counts):
    """Every row by the matrix that a list of groups names for it; zeros past them."""
    group = torch.repeat_interleave(counts)
    y = torch.einsum("tk,tnk->tn", x[: len(group)].double(), weight.double()[group])
    return torch.cat([y, y.new_zeros(len(x) - len(group), y.shape[1])])


def agrees(multiply, counts, past, K, N, dtype, layout, *, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    rows = sum(counts)
    x, dy = draw(rows + past, K), draw(rows + past, N)
    weight = draw(len(counts), N, K) if layout == "GNK" else draw(len(counts), K, N)
    counts = torch.tensor(counts, device=DEVICE, dtype=random.Random(seed).choice(INTEGERS))
    # Whoever reads rows past the groups as numbers, forward or backward, shows it.
    x[rows:], dy[rows:] = float("nan"), float("nan")

    def results(multiply, x, weight):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = multiply(x, weight if layout == "GNK" else weight.mT, counts)
        return y, *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))

    got = results(multiply, x, weight)
    want = results(in_float64, x.double(), weight.double())
    atol, rtol = TOLERANCE[dtype]
    for name, mine, exact in zip(("y", "dx", "dweight"), got, want, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(
            mine.double(),
            exact,
            atol=atol,
            rtol=rtol,
            msg=lambda said, name=name: f"{name} of {counts.tolist()}, {K}, {N}, {seed}: {said}",
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_and_every_gradient_are_those_of_products_in_float64(case, backend):
    if backend == "native" and DEVICE == "cuda" and case[4] != torch.bfloat16:
        pytest.skip("PyTorch has a grouped product of bfloat16 alone on a GPU")
    agrees(group_gemm.backend(backend), *case)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("case", ODD.values(), ids=ODD)
def test_rows_need_not_be_whole_vectors(case, backend):
    agrees(group_gemm.backend(backend), *case)


def test_groups_are_multiplied_in_few_heights_that_add_little():
    heights = {rows: padded_height(rows) for rows in range(1, 4097)}
    assert all(rows <= height for rows, height in heights.items())
    assert all(heights[rows] <= 1.25 * rows for rows in range(128, 4097))
    assert len({heights[rows] for rows in range(129, 4097)}) == 4 * 5
    assert padded_height(0) == 0


def some_shape(seed, vector):
    """A few groups, many of them without rows; widths with and without whole vectors, or multiples
    of one."""
    drawn = random.Random(seed)
    counts = [drawn.choice((0, 0, 1, 5, 16, 17)) for _ in range(drawn.randint(1, 3))]
    K, N = (drawn.choice((8, 8, 16, 24, drawn.randint(1, 20))) for _ in range(2))
    K, N = (-(-width // vector) * vector for width in (K, N))
    past = drawn.choice((0, 0, 9))
    return counts, past, K, N, drawn.choice(list(TOLERANCE)), drawn.choice(("GNK", "GKN"))


@pytest.mark.parametrize(
    ("backend", "vector"),
    [
        ("eager", 1),
        ("native", 8),
        pytest.param("triton", 1, marks=[needs_triton, pytest.mark.slow]),
    ],
)
def test_it_agrees_for_a_hundred_ragged_shapes(backend, vector):
    for seed in todays(range(100), 25) if backend == "triton" else range(100):
        case = some_shape(seed, vector)
        if backend == "native" and DEVICE == "cuda":
            case = (*case[:4], torch.bfloat16, case[5])
        agrees(group_gemm.backend(backend), *case, seed=seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_matrices_that_do_not_learn_keep_no_rows_for_the_backward_pass(backend):
    x = torch.ones(5, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(2, 16, 8, device=DEVICE, dtype=torch.bfloat16)
    counts = torch.tensor([2, 3], device=DEVICE)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = group_gemm.backend(backend)(x, weight, counts)
    assert not any(tensor.shape == x.shape for tensor in kept)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert (dx == 16).all()


@pytest.mark.slow
def test_a_plain_call_compiles_without_a_graph_break_forward_and_backward():
    x, weight = torch.randn(6, 8), torch.randn(2, 16, 8)
    counts = torch.tensor([2, 3])
    compiled = torch.compile(group_gemm, fullgraph=True, backend="aot_eager")

    def results(multiply):
        inputs = [tensor.to(DEVICE, torch.bfloat16).requires_grad_() for tensor in (x, weight)]
        y = multiply(*inputs, counts.to(DEVICE))
        return y, *torch.autograd.grad(y.sum(), inputs)

    torch.testing.assert_close(results(compiled), results(group_gemm.reference))


@needs_triton
@pytest.mark.parametrize(("R", "W"), [(1, 1), (70, 5), (3, 5000)])
def test_triton_zeroes_what_is_unwritten_and_nothing_else(R, W):
    counts = torch.randint(0, 2, (R,), generator=torch.Generator().manual_seed(0))
    y = torch.full((R, 1, W), float("nan"), device=DEVICE)
    zero_empty.backend("triton")(y, counts.to(DEVICE))
    assert torch.equal(y.isnan().flatten(1).all(1).cpu(), counts > 0)
    assert (y[counts == 0] == 0).all()
    for end in {0, R // 2, R}:
        y = torch.full((R, W), float("nan"), device=DEVICE)
        zero_tail_rows.backend("triton")(y, torch.tensor([0, end], dtype=torch.int32).to(DEVICE))
        assert y[:end].isnan().all()
        assert (y[end:] == 0).all()


def test_a_backend_says_what_it_does_not_take():
    counts = torch.tensor([1, 1])

    def asked(backend, x, weight, counts=counts):
        with pytest.raises(UnsupportedError) as error:
            group_gemm.backend(backend)(x, weight, counts)
        return str(error.value)

    x, weight = torch.ones(2, 8), torch.ones(2, 16, 8)
    assert "x is (2, 8), its weight (2, 16, 4) and the counts (2,)" in asked(
        "native", x, weight[..., :4]
    )
    assert "x is torch.float32 and its weight torch.float64" in asked("native", x, weight.double())
    assert "K is 7; it takes multiples of 4 (16 bytes)" in asked(
        "native", x[:, :7], weight[..., :7]
    )
    assert "the counts are torch.float32" in asked("native", x, weight, counts.float())
    if "triton" in group_gemm.backends:
        assert "x is (8,)" in asked("triton", x[0], weight)


def test_quack_says_what_to_install_before_any_product():
    try:
        version("quack-kernels")
    except PackageNotFoundError:
        with pytest.raises(UnsupportedError, match="pip install quack-kernels"):
            group_gemm.backend("quack")
    else:
        assert group_gemm.backend("quack")


def gemm_as_documented(A, B, *, cu_seqlens_m=None, cu_seqlens_k=None, tuned):
    """QuACK's `gemm` of groups, with what it asks of layouts: written from its documentation."""
    assert not tuned
    if cu_seqlens_m is not None:
        assert A.stride(-1) == 1
        assert 1 in B.stride()[-2:]
        out = A.new_full((A.shape[0], B.shape[-1]), float("nan"))
        for number, (start, end) in enumerate(pairwise(cu_seqlens_m)):
            out[start:end] = A[start:end] @ B[number]
        return out
    assert cu_seqlens_k is not None
    assert cu_seqlens_k.dtype == torch.int32
    assert A.stride(-2) == B.stride(-1) == 1
    return torch.stack([A[:, start:end] @ B[start:end] for start, end in pairwise(cu_seqlens_k)])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_quack_is_asked_as_its_documentation_says(case, monkeypatch):
    stand_in = ModuleType("quack.gemm_interface")
    monkeypatch.setattr(stand_in, "gemm", gemm_as_documented, raising=False)
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", stand_in)
    agrees(quack.PRODUCTS.by_rows, *case)
