"""Recomputation for a backward pass that is made of several."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from penstock.engine.activations.checkpoint_moe import checkpoint_expert_gates
from penstock.engine.activations.recompute_once import checkpoint_once
from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.experts import Experts, call_experts, select_expert_ops


class Twice(nn.Module):
    """Two matrices and what autograd saves between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.calls = 0
        self.between = []

    def forward(self, x):
        self.calls += 1
        held = self.up(x).sigmoid()
        self.between.append(weakref.ref(held.untyped_storage()))
        return self.down(held)


@pytest.mark.parametrize(
    "casting", [nullcontext, partial(torch.autocast, "cpu", dtype=torch.bfloat16)]
)
def test_what_is_computed_again_serves_every_backward_pass_and_goes_with_the_graph(casting):
    layer = Twice()
    x = torch.randn(3, 4, requires_grad=True)
    wanted_of = [x, *layer.parameters()]
    with casting():
        wanted = torch.autograd.grad(layer(x).float().square().sum(), wanted_of)
    layer.calls, layer.between = 0, []
    with casting():
        y = checkpoint_once(nn.Module.__call__, layer, x)
    assert layer.between[0]() is None, "nothing is kept of the forward pass"
    loss = y.float().square().sum()
    # One pass for the input, then one for each weight.
    found = [torch.autograd.grad(loss, [one], retain_graph=True)[0] for one in wanted_of]
    assert layer.calls == 2
    assert layer.between[1]() is not None
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    del y, loss
    assert layer.between[1]() is None


def test_without_gradients_a_call_is_just_made():
    layer = Twice()
    with torch.no_grad():
        y = checkpoint_once(nn.Module.__call__, layer, torch.ones(3, 4))
    assert (layer.calls, y.requires_grad) == (1, False)


R, D, F = 9, 8, 16


class Counted:
    """Experts whose products are counted, and the memory of what lies between them."""

    def __init__(self, implementation):
        torch.manual_seed(0)
        operations = select_expert_ops(implementation)
        config = ExpertsConfig(layers=(0,), num_experts=3, experts_per_token=1, intermediate_size=F)
        self.products, self.between = 0, []
        self.experts = Experts(config, D, operations=replace(operations, group_gemm=self.multiply))
        for parameter in self.experts.parameters():
            torch.nn.init.normal_(parameter)
        self._multiply = operations.group_gemm

    def multiply(self, x, weight, counts):
        self.products += 1
        y = self._multiply(x, weight, counts)
        for tensor in (x, y):
            if tensor.shape[1] != D:
                self.between.append(weakref.ref(tensor.untyped_storage()))
        return y

    def alive(self):
        return sum(one() is not None for one in self.between)


@pytest.mark.parametrize("implementation", ["eager", "native"])
@pytest.mark.parametrize(
    "casting", [nullcontext, partial(torch.autocast, "cpu", dtype=torch.bfloat16)]
)
@pytest.mark.parametrize("frozen", [(), ("gate_up_proj",), ("gate_up_proj", "down_proj")])
def test_of_experts_the_first_half_alone_is_computed_again(casting, implementation, frozen):
    counted = Counted(implementation)
    experts = counted.experts
    for name in frozen:
        experts.get_parameter(name).requires_grad_(False)
    dtype = torch.float32 if casting is nullcontext else torch.bfloat16
    x = torch.randn(R, D, dtype=dtype, requires_grad=True)
    counts = torch.tensor([5, 0, 4])
    wanted_of = [x, *(p for p in experts.parameters() if p.requires_grad)]
    with casting():
        loss = call_experts(experts, x, counts).float().square().sum()
    wanted = torch.autograd.grad(loss, wanted_of)
    del loss
    counted.products, counted.between = 0, []
    with casting():
        y = checkpoint_expert_gates(experts, x, counts)
    assert (counted.products, counted.alive()) == (2, 0)
    loss = y.float().square().sum()
    # One pass for the rows, then one for each weight.
    found = [torch.autograd.grad(loss, [one], retain_graph=True)[0] for one in wanted_of]
    assert counted.products == 3
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    del y, loss
    assert counted.alive() == 0


def test_experts_without_gradients_are_just_called():
    counted = Counted("eager")
    with torch.no_grad():
        checkpoint_expert_gates(counted.experts, torch.ones(R, D), torch.tensor([5, 0, 4]))
    assert counted.products == 2
