"""NovoGrad, judged by its paper's algorithm written out for one tensor after another."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock.config.schema.optimizer import OptimConfig
from penstock.optim.anyprecision import StatePrecision
from penstock.optim.build import build_optimizer
from penstock.optim.groups import Grouping

SHAPES = {"matrix": (24, 8), "norm": (24,), "head": (5, 8)}
STACK = (3, 12, 8)
LR, DECAY = 0.01, 0.1


def drawn(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    seed = 100 * step + len(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_the_paper(
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    *,
    betas: tuple[float, float] = (0.95, 0.98),
    eps: float = 1e-8,
    decay: float = DECAY,
    grad_averaging: bool = False,
    amsgrad: bool = False,
) -> torch.Tensor:
    """Algorithm 1 in fp64 (Ginsburg et al. 2019): v_1 = |g_1|^2, m_1 = g_1 / |g_1| + d w.
    NeMo adds eps to the root, and takes a share 1 - beta_1 of what comes to m where it averages."""
    weight = weight.double()
    share = 1 - betas[0] if grad_averaging else 1.0
    v = highest = 0.0
    m = torch.zeros_like(weight)
    for number, gradient in enumerate(gradients):
        square = float(gradient.double().square().sum())
        v = square if number == 0 else betas[1] * v + (1 - betas[1]) * square
        highest = max(highest, v)
        divisor = (highest if amsgrad else v) ** 0.5 + eps
        m = betas[0] * m + share * (gradient.double() / divisor + decay * weight)
        weight = weight - LR * m
    return weight


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"betas": [0.8, 0.5], "eps": 0.5},
        {"grad_averaging": True},
        {"amsgrad": True, "betas": [0.9, 0.3]},
        {"amsgrad": True, "grad_averaging": True},
    ],
)
def test_twenty_steps_are_those_of_the_paper_of_each_tensor_by_itself(told: dict[str, Any]) -> None:
    shapes: dict[str, tuple[int, ...]] = {**SHAPES, "stack": STACK}
    weights = {name: nn.Parameter(drawn(name, shape, -1)) for name, shape in shapes.items()}
    begun = {name: weight.detach().clone() for name, weight in weights.items()}
    optim = OptimConfig(optimizer="novograd", lr=LR, optimizer_kwargs=told)
    made = build_optimizer(weights.items(), optim, Grouping(DECAY, no_decay_params=["norm"]))
    # Gradients grow and shrink, so that the largest norm is not the last one.
    sizes = [1 + 5 * (step % 7 == 3) for step in range(20)]
    drawing = {
        name: [size * drawn(name, shape, step) for step, size in enumerate(sizes)]
        for name, shape in shapes.items()
    }
    for step in range(20):
        for name, weight in weights.items():
            weight.grad = drawing[name][step].clone()
        made.step()
    settings = {**told, "betas": tuple(told.get("betas", (0.95, 0.98)))}
    for name in SHAPES:
        decay = 0.0 if name == "norm" else DECAY
        want = by_the_paper(begun[name], drawing[name], decay=decay, **settings)
        torch.testing.assert_close(weights[name].double(), want, rtol=2e-6, atol=2e-7)
    for number, matrix in enumerate(begun["stack"]):
        want = by_the_paper(matrix, [one[number] for one in drawing["stack"]], **settings)
        torch.testing.assert_close(weights["stack"][number].double(), want, rtol=2e-6, atol=2e-7)


def test_a_gradient_of_nothing_moves_nothing_and_the_average_begins_after_it() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optim = OptimConfig(optimizer="novograd", lr=LR, optimizer_kwargs={"eps": 0.0})
    made = build_optimizer([("w", weight)], optim)
    weight.grad = torch.zeros(3, 2)
    made.step()
    assert torch.equal(weight, torch.ones(3, 2))
    weight.grad = torch.full((3, 2), 4.0)
    made.step()
    torch.testing.assert_close(weight, torch.full((3, 2), 1 - LR / 6**0.5))


def test_states_and_weights_are_kept_in_bf16_where_that_is_said() -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optim = OptimConfig(optimizer="novograd", lr=LR)
    made = build_optimizer([("w", weight)], optim, precision=StatePrecision(states=torch.bfloat16))
    weight.grad = torch.ones(3, 2, dtype=torch.bfloat16)
    made.step()
    state = made.state[weight]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["grad_sq"].tolist() == [6.0]
    assert torch.equal(weight, torch.full((3, 2), 1 - LR / 6**0.5).bfloat16())
