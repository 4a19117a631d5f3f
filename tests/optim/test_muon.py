"""Muon, judged by torch's own of each matrix, and the rest by torch's AdamW."""

import pytest
import torch
from torch import nn

from penstock.config.schema.optimizer import OptimConfig
from penstock.optim.anyprecision import StatePrecision
from penstock.optim.build import build_optimizer
from penstock.optim.groups import Grouping

SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16), "bias": (24,)}
STACK = (3, 12, 8)


def weights(name, shape):
    generator = torch.Generator().manual_seed(len(name))
    return nn.Parameter(torch.randn(shape, generator=generator))


def gradient(step, name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + len(name)))


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_twenty_steps_are_those_of_torch_of_each_matrix_by_itself(adjust, nesterov):
    ours = {name: weights(name, shape) for name, shape in SHAPES.items()}
    ours["stack"] = weights("stack", STACK)
    settings = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4}
    optim = OptimConfig(
        optimizer="muon",
        lr=0.01,
        muon_adjust_lr_fn=adjust,
        **{f"muon_{name}": value for name, value in settings.items()},
    )
    grouping = Grouping(0.1, matrices={*SHAPES, "stack"} - {"bias"}, muon_lr_multiplier=5.0)
    mine = build_optimizer(ours.items(), optim, grouping)

    theirs = {name: weights(name, shape) for name, shape in SHAPES.items()}
    stack = [nn.Parameter(one.detach().clone()) for one in weights("stack", STACK)]
    matrices = [one for one in theirs.values() if one.ndim == 2] + stack
    judges = [
        torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1, adjust_lr_fn=adjust, **settings),
        torch.optim.AdamW([theirs["bias"]], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    for step in range(20):
        for name, one in ours.items():
            one.grad = gradient(step, name, one.shape)
            if name == "stack":
                for matrix, part in zip(stack, one.grad, strict=True):
                    matrix.grad = part
            else:
                theirs[name].grad = one.grad
        for optimizer in (mine, *judges):
            optimizer.step()
    torch.testing.assert_close(ours["bias"], theirs["bias"], rtol=1e-6, atol=1e-7)
    # torch sums products in another order, and some of them round to the next number in bfloat16:
    # by less than 1/1000 of what twenty steps move a weight.
    moved = torch.linalg.norm(theirs["square"] - weights("square", SHAPES["square"]))
    for name in ("tall", "wide", "square"):
        assert torch.linalg.norm(ours[name] - theirs[name]) < moved / 1000, name
    assert torch.linalg.norm(ours["stack"] - torch.stack([*stack])) < moved / 1000


def test_a_step_is_the_reference_systems():
    """Two digits of momentum decide nothing yet: the first step of a small matrix, as that system
    computed it."""
    weight = nn.Parameter(torch.tensor([[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]))
    weight.grad = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])
    optim = OptimConfig(optimizer="muon", lr=0.1)
    build_optimizer([("w", weight)], optim, Grouping(0.1, matrices={"w"})).step()
    want = [
        [0.06367187947, 0.07956640422, 0.14409375191],
        [0.24153126776, 0.36377343535, 0.45925781131],
    ]
    torch.testing.assert_close(weight.detach(), torch.tensor(want), rtol=1e-6, atol=1e-7)


def test_momentum_in_bf16_is_near_that_in_float32():
    def after(states):
        weight = weights("square", (16, 16))
        optim = OptimConfig(optimizer="muon", lr=0.01)
        optimizer = build_optimizer(
            [("w", weight)], optim, Grouping(matrices={"w"}), precision=StatePrecision(states)
        )
        for step in range(5):
            weight.grad = gradient(step, "w", weight.shape)
            optimizer.step()
        kept = optimizer.state[weight]["momentum_buffer"]
        assert kept.dtype == states
        return weight.detach() - weights("square", (16, 16)).detach()

    exact, rounded = after(torch.float32), after(torch.bfloat16)
    error = torch.linalg.norm(rounded - exact) / torch.linalg.norm(exact)
    # Singular values of a Gaussian come near to 0, where a small change turns far.
    assert 0 < error < 0.05
