"""Frozen layers of one input and their adapters as one node of the graph: judged by the formula in
fp64 with PyTorch's gradients, and by PEFT's layers."""

from collections import Counter
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from penstock.adapters.factor_copies import FactorCopies
from penstock.adapters.lora import LoraLinear
from penstock.models.layers.dropout import Dropout
from penstock.models.layers.joint_linear import project

INPUTS, TOKENS, SCALE = 24, 10, 0.75


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **kwargs or {})

    @property
    def products(self):
        return sum(self.counts[name] for name in ("mm", "addmm", "addmm_"))


def adapted_layer(parts, adapted, *, ranks=3, bias=False, dropout=0.0, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    base = nn.Linear(INPUTS, sum(parts.values()), bias=bias, dtype=dtype)
    layer = LoraLinear(
        base,
        parts=parts,
        adapted=adapted,
        rank=ranks,
        scale=SCALE,
        dropout={part: Dropout(dropout, part) for part in adapted},
    )
    for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
        factor.data = torch.randn(factor.shape, dtype=dtype)
    return layer


def fused_and_single(dtype=torch.float64):
    """A fused projection of which two parts are adapted, and a layer with a bias."""
    fused = adapted_layer({"a": 8, "b": 4, "c": 6}, ["a", "c"], dtype=dtype)
    return fused, adapted_layer({"d": 7}, ["d"], bias=True, dtype=dtype, seed=1)


def by_definition(layer, x):
    """The sum of the weight and every part's `s B A`, applied to x."""
    delta = torch.zeros_like(layer.weight)
    rows = dict(zip(layer.parts, delta.split([*layer.parts.values()]), strict=True))
    weight = [
        rows[part] + layer.scale * layer.lora_B[part] @ layer.lora_A[part]
        if part in layer.lora_A
        else rows[part]
        for part in layer.parts
    ]
    return F.linear(x, layer.weight + torch.cat(weight), layer.bias)


def loss_of(outputs):
    """A sum with another weight for every number."""
    terms = [
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in outputs
    ]
    return torch.stack(terms).sum()


def gradients_of(layers, x, outputs):
    factors = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    wanted = [x, *factors] if x.requires_grad else factors
    return torch.autograd.grad(loss_of(outputs), wanted)


@pytest.mark.parametrize("learns_below", [True, False])
def test_outputs_and_gradients_of_layers_of_one_input_are_those_of_the_definition(learns_below):
    layers = fused_and_single()
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=learns_below)
    want = [by_definition(layer, x) for layer in layers]
    got = project(x, *layers)
    assert len({y.grad_fn for y in got}) == 1, "one node of the graph"
    torch.testing.assert_close(list(got), want)
    torch.testing.assert_close(gradients_of(layers, x, got), gradients_of(layers, x, want))


def test_an_output_without_a_gradient_leaves_the_other_gradients_as_they_are():
    layers = fused_and_single()
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    for index, layer in enumerate(layers):
        wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
        got = torch.autograd.grad(loss_of([project(x, *layers)[index]]), wanted)
        want = torch.autograd.grad(loss_of([by_definition(layer, x)]), wanted)
        torch.testing.assert_close(got, want)


def test_layers_without_an_adapter_or_with_dropout_are_called_by_themselves():
    [fused, single], plain = fused_and_single(), nn.Linear(INPUTS, 5, dtype=torch.float64)
    dropping = adapted_layer({"e": 4}, ["e"], dropout=0.5, seed=2)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64)
    want = [by_definition(fused, x), plain(x), by_definition(single, x)]
    torch.testing.assert_close(list(project(x, fused, plain, single)), want)
    called = []
    hook = single.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(list(project(x, fused, single))[1], want[2])
    assert called, "a hook of a layer is called"
    hook.remove()
    want = [by_definition(layer, x) for layer in (fused, dropping)]
    torch.testing.assert_close(list(project(x, fused, dropping)), want)


def bf16_layer():
    """A bf16 weight and fp32 factors, as adapters are trained."""
    layer = adapted_layer({"a": 40}, ["a"], ranks=8, dtype=torch.float32)
    layer.weight.data = layer.weight.data.bfloat16()
    return layer


def peft_layer(layer):
    """PEFT's layer with the same weight and factors."""
    base = nn.Linear(INPUTS, 40, bias=False, dtype=torch.bfloat16)
    base.weight.data = layer.weight.data.clone()
    config = peft.LoraConfig(r=8, lora_alpha=6, target_modules=["layer"])
    module: Any = nn.ModuleDict({"layer": base})
    theirs: Any = peft.get_peft_model(module, config, autocast_adapter_dtype=True)
    assert theirs.peft_config["default"].lora_alpha == 8 * SCALE
    made = theirs.base_model.model["layer"]
    made.lora_A["default"].weight.data = layer.lora_A["a"].data.clone()
    made.lora_B["default"].weight.data = layer.lora_B["a"].data.clone()
    return made, [made.lora_A["default"].weight, made.lora_B["default"].weight]


def test_under_autocast_errors_are_not_greater_than_those_of_peft():
    layer = bf16_layer()
    theirs, their_factors = peft_layer(layer)
    x = torch.randn(512, INPUTS).bfloat16().requires_grad_()
    exact = adapted_layer({"a": 40}, ["a"], ranks=8, dtype=torch.float64)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    wide_x = x.detach().double().requires_grad_()
    want = by_definition(exact, wide_x)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = {"ours": layer(x), "theirs": theirs(x)}
    factors = {"ours": [layer.lora_A["a"], layer.lora_B["a"]], "theirs": their_factors}
    exact_factors = [exact.lora_A["a"], exact.lora_B["a"]]
    exact_gradients = torch.autograd.grad(loss_of([want]), [wide_x, *exact_factors])
    errors = {}
    for name, y in outputs.items():
        upstream = torch.linspace(-1, 2, y.numel()).view_as(y).to(y.dtype)
        got = (y, *torch.autograd.grad(y, [x, *factors[name]], upstream))
        pairs = zip(got, (want, *exact_gradients), strict=True)
        errors[name] = [
            float((g.detach() - w.detach()).norm() / w.detach().norm()) for g, w in pairs
        ]
        assert got[2].dtype == torch.float32
    for ours, other in zip(errors["ours"], errors["theirs"], strict=True):
        assert ours <= 1.05 * other < 0.01


def test_recomputation_leaves_out_the_last_product_with_the_weight():
    layer = bf16_layer()
    layer.copies = FactorCopies()
    x = torch.randn(64, INPUTS).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(layer, x, use_reentrant=False)
    with Operators() as operators:
        y.sum().backward()
    # x A^T again; dy B, its product with A, dy W, and the gradients of A and B.
    assert operators.products == 6
    # The gradients alone: PyTorch has no product of bf16 matrices in fp32 on CPUs.
    assert operators.counts["_to_copy"] + operators.counts["copy_"] <= 2


def test_matrices_are_cast_once_after_an_update_of_the_parameters():
    layers = [bf16_layer(), bf16_layer()]
    copies = FactorCopies()
    for layer in layers:
        layer.copies = copies
    factors = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    x = torch.randn(64, INPUTS).bfloat16()

    def passes():
        with Operators() as operators, torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                loss_of([y.float() for y in project(x, *layers)]).backward()
        return operators.counts["_foreach_copy_"]

    assert passes() == 1
    assert passes() == 0
    optimizer = torch.optim.SGD(factors, lr=0.1)
    for update in (
        optimizer.step,
        lambda: factors[0].detach().copy_(torch.ones(())),
        lambda: setattr(factors[1], "data", torch.zeros_like(factors[1])),
    ):
        update()
        assert passes() == 1
        with torch.autocast("cpu", torch.bfloat16):
            got = project(x, *layers)
            for layer in layers:
                layer.copies = None
            want = project(x, *layers)
        assert all(map(torch.equal, got, want))
        for layer in layers:
            layer.copies = copies


def test_a_parameter_in_the_dtype_of_products_is_not_copied():
    layer = adapted_layer({"a": 8}, ["a"])
    factors = FactorCopies().get((layer,), torch.float64)
    assert factors.a_RK.data_ptr() == layer.lora_A["a"].data_ptr()
    assert factors.b_Nr[0].data_ptr() == layer.lora_B["a"].data_ptr()
