"""Recomputation for a backward pass that is made of several."""

import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from penstock.engine.recompute_once import run_again_once


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
        y = run_again_once(nn.Module.__call__, layer, x)
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
        y = run_again_once(nn.Module.__call__, layer, torch.ones(3, 4))
    assert (layer.calls, y.requires_grad) == (1, False)
