"""permute and unpermute: sorting by expert and adding up, against lists and loops."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kernels.op import UnsupportedError
from penstock_kernels.permute import permute, sort_by_expert, unpermute
from tests.kernels.where import DEVICE, needs_triton
from tests.turns import todays

BACKENDS = ["eager", pytest.param("triton", marks=needs_triton)]
pytestmark = pytest.mark.usefixtures("poisoned")

# 16 bits: results are rounded once, or cut off in Triton's interpreter; the plain gradient of
# copying is rounded after every copy.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (4e-2, 2e-2),
    torch.float16: (5e-3, 3e-3),
}

# Experts, and what each token chose of them: -1 and numbers past the last are nobody.
CHOICES: dict[str, tuple[int, Any]] = {
    "an-expert-without-tokens": (4, [[0, 3], [3, 1], [1, 0]]),
    "one-expert-has-all": (3, [[1], [1], [1], [1]]),
    "one-token-in-all": (5, [[4, 2, 0]]),
    "no-tokens": (3, torch.empty(0, 2, dtype=torch.int64)),
    "copies-of-nobody": (2, [[-1, 1], [0, 2], [-1, 9], [1, 0]]),
    "twice-the-same-expert": (2, [[1, 1], [0, 1]]),
}
chosen = pytest.mark.parametrize(("experts", "choice"), CHOICES.values(), ids=CHOICES)


def by_hand(choice, experts):
    """Each expert's copies, as pairs of token and place among its choices."""
    rows = [[] for _ in range(experts)]
    for token, numbers in enumerate(choice):
        for k, expert in enumerate(numbers):
            if 0 <= expert < experts:
                rows[expert].append((token, k))
    return rows


def in_float64(x, weights, choice, experts, of_row):
    """Every token's copies, each through `of_row`, weighted and added one after another."""
    total = [row * 0 for row in x]
    number = 0
    for copies in by_hand(choice, experts):
        for token, k in copies:
            total[token] = total[token] + of_row(x[token], number) * weights[token, k]
            number += 1
    return torch.stack(total) if total else torch.zeros_like(x)


def agrees(backend, experts, choice, D, dtype, *, weighted, seed=0):
    choice = torch.as_tensor(choice)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(choice), D, generator=generator).to(DEVICE, dtype)
    dy = torch.randn(len(choice), D, generator=generator).to(DEVICE, dtype)
    weights = torch.rand(choice.shape, generator=generator).to(DEVICE)
    order = sort_by_expert(choice.to(DEVICE), experts)
    somebody = int(order.counts.sum())
    # What experts would do: to every row another number, and to nobody's rows whatever it is.
    factor = 1 + torch.arange(choice.numel(), device=DEVICE) / 16

    def ours(x, weights):
        rows = permute.backend(backend)(x, order)
        assert (rows[somebody:] == 0).all()
        rows = rows * factor[:, None].to(dtype)
        rows = torch.cat([rows[:somebody], torch.full_like(rows[somebody:], float("nan"))])
        return unpermute.backend(backend)(rows, weights if weighted else None, order)

    def theirs(x, weights):
        weights = weights if weighted else torch.ones_like(weights)
        rounded = factor.to(dtype).double()
        return in_float64(
            x, weights, choice.tolist(), experts, lambda row, number: row * rounded[number]
        )

    results = []
    for function, width in ((ours, x.dtype), (theirs, torch.float64)):
        inputs = [x.to(width, copy=True), weights.to(torch.promote_types(width, torch.float32))]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        y = function(*inputs)
        if choice.numel():
            grads = torch.autograd.grad(
                y, inputs[: 1 + weighted], dy.to(y.dtype), materialize_grads=True
            )
            results.append((y.double(), *(grad.double() for grad in grads)))
        else:
            results.append((y.double(),))
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(*results, atol=atol, rtol=rtol, msg=lambda said: f"{seed}: {said}")


@pytest.mark.parametrize("backend", BACKENDS)
@chosen
def test_rows_are_each_experts_copies_in_the_order_of_their_tokens(experts, choice, backend):
    choice = torch.as_tensor(choice)
    order = sort_by_expert.backend(backend)(choice.to(DEVICE), experts)
    rows = by_hand(choice.tolist(), experts)
    assert order.counts.tolist() == [len(copies) for copies in rows]
    K = choice.shape[1]
    sorted_copies = [token * K + k for copies in rows for token, k in copies]
    nobody = choice.numel() - len(sorted_copies)
    assert order.copy_of_row.tolist() == sorted_copies + [-1] * nobody
    for row, copy in enumerate(sorted_copies):
        assert order.row_of_copy[copy // K, copy % K] == row
    assert int((order.row_of_copy < 0).sum()) == nobody


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@chosen
def test_sums_and_every_gradient_are_those_of_loops(experts, choice, dtype, backend):
    agrees(backend, experts, choice, 20, dtype, weighted=True)


@needs_triton
@pytest.mark.parametrize("experts", [1, 7, 128])
def test_triton_sorts_more_rows_than_a_program_holds_as_the_reference_does(experts):
    generator = torch.Generator().manual_seed(experts)
    choice = torch.randint(-1, experts + 1, (900, 3), generator=generator).to(DEVICE)
    mine = sort_by_expert.backend("triton")(choice, experts)
    assert all(
        torch.equal(getattr(mine, name), value)
        for name, value in vars(sort_by_expert.reference(choice, experts)).items()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_weights_rows_are_added_as_they_are(backend):
    experts, choice = CHOICES["copies-of-nobody"]
    agrees(backend, experts, choice, 7, torch.float32, weighted=False)


@given(st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_what_was_sorted_comes_back(data):
    experts = data.draw(st.integers(1, 6))
    K = data.draw(st.integers(1, 3))
    one = st.lists(st.integers(0, experts - 1), min_size=K, max_size=K)
    choice = torch.tensor(data.draw(st.lists(one, min_size=1, max_size=8)))
    order = sort_by_expert(choice, experts)
    x = torch.arange(len(choice) * 2.0).view(-1, 2)
    assert torch.equal(unpermute(permute(x, order), None, order), K * x)
    # Rows really are sorted: each holds its expert's number if that is what was copied.
    numbers = permute(choice[:, :1].float(), sort_by_expert(choice[:, :1], experts))
    assert numbers.flatten().tolist() == sorted(choice[:, 0].tolist())


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("triton", marks=[needs_triton, pytest.mark.slow])]
)
def test_it_agrees_with_loops_for_a_hundred_ragged_shapes(backend):
    for seed in todays(range(100), 25) if backend == "triton" else range(100):
        drawn = random.Random(seed)
        experts, K = drawn.randint(1, 5), drawn.randint(1, 3)
        last = experts if drawn.random() < 0.3 else experts - 1  # some choices are nobody
        choice = [[drawn.randint(0, last) for _ in range(K)] for _ in range(drawn.randint(0, 4))]
        choice = torch.tensor(choice, dtype=torch.int64).view(-1, K)
        D, dtype = drawn.randint(1, 40), drawn.choice(list(TOLERANCE))
        weighted = drawn.random() < 0.8
        agrees(backend, experts, choice, D, dtype, weighted=weighted, seed=seed)


@needs_triton
def test_rows_wider_than_a_program_holds_are_moved_whole():
    agrees("triton", 2, [[1, 0], [0, 1]], 2100, torch.float32, weighted=True)


def test_orders_of_other_tokens_are_refused():
    order = sort_by_expert(torch.tensor([[0, 1], [1, 0]]), 2)
    if "triton" not in permute.backends:
        pytest.skip("triton is not published for this system")
    with pytest.raises(UnsupportedError, match=r"x is \(3, 4\) and the order of 2 tokens"):
        permute.backend("triton")(torch.ones(3, 4), order)
    with pytest.raises(UnsupportedError, match=r"y is \(3, 4\) and the order of 4 rows"):
        unpermute.backend("triton")(torch.ones(3, 4), None, order)
    with pytest.raises(UnsupportedError, match=r"weights are \(2, 1\) and .* \(2, 2\) choices"):
        unpermute.backend("triton")(torch.ones(4, 4), torch.ones(2, 1), order)
