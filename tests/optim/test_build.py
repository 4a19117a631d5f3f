"""Optimizers and their groups, judged by torch.optim set up by hand."""

import copy
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch import nn

from penstock.config.loading.load import loads
from penstock.config.schema.optimizer import Argument, OptimConfig
from penstock.core.errors import CapabilityError, ConfigError
from penstock.optim.anyprecision import AnyPrecisionAdamW, StatePrecision
from penstock.optim.build import build_optimizer
from penstock.optim.groups import MATRICES, RATE, Grouping, layerwise_lr_decay, parameter_groups
from penstock.optim.optimizer_by_name import named_optimizer
from tests.config.values import smallest
from tests.packages import installed, write_package

NAMED = {
    "adamw": ({}, torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}),
    "adamw told": (
        {"betas": [0.8, 0.9], "eps": 1e-3},
        torch.optim.AdamW,
        {"betas": (0.8, 0.9), "eps": 1e-3},
    ),
    "sgd": ({}, torch.optim.SGD, {}),
    "sgd told": (
        {"momentum": 0.9, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "anyprecision_adamw": ({"eps": 1e-4}, torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-4}),
    "torch.optim.RAdam": ({"betas": [0.8, 0.9]}, torch.optim.RAdam, {"betas": (0.8, 0.9)}),
    "torch.optim.Adafactor": ({"d": 2.0}, torch.optim.Adafactor, {"d": 2.0}),
}
"""What it is told, and torch's own that does the same."""


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def steps(net, optimizer):
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(20):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def by_hand(net, optimizer, weight_decay, **settings):
    exempt = [net[0].bias, *net[1].parameters(), net[2].bias]
    groups = [
        {"params": [net[0].weight, net[2].weight], "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return optimizer(groups, lr=0.01, foreach=False, **settings)


@pytest.mark.parametrize("name", NAMED)
def test_training_is_torchs_with_groups_made_by_hand(name):
    told, kind, settings = NAMED[name]
    ours, theirs = model(), model()
    optimizer = build_optimizer(
        ours.named_parameters(),
        OptimConfig(optimizer=name.removesuffix(" told"), lr=0.01, optimizer_kwargs=told),
        Grouping(0.1, no_decay_modules=["1"], no_decay_params=["bias"]),
    )
    reference = by_hand(theirs, kind, 0.1, **settings)
    before = [parameter.clone() for parameter in copy.deepcopy(ours).parameters()]
    after = steps(ours, optimizer)
    torch.testing.assert_close(after, steps(theirs, reference), rtol=1e-6, atol=1e-7)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_names_decide_the_groups_and_frozen_parameters_are_left_out():
    net = model()
    net[2].weight.requires_grad_(False)
    groups = parameter_groups(net.named_parameters(), Grouping(0.1, no_decay_params=["bias"]))
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [["0.weight", "1.weight"], ["0.bias", "1.bias", "2.bias"]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def rates_of(names, optim, grouping):
    """The rate and the decay that each name has, and whether it is a matrix of Muon."""
    named = [(name, nn.Parameter(torch.ones(1, 1))) for name in names]
    optimizer = build_optimizer(named, optim, grouping)
    called = {id(parameter): name for name, parameter in named}
    return {
        called[id(parameter)]: (group["lr"], group["weight_decay"], group[MATRICES])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_second_factors_learn_faster_in_groups_of_their_own_whatever_decays():
    names = [
        "layers.0.q_proj.lora_A.q_proj",
        "layers.0.q_proj.lora_B.q_proj",
        "layers.0.v_proj.lora_B.v_proj",
        "model.embed_tokens.lora_B.embed_tokens",
    ]
    grouping = Grouping(0.5, no_decay_params=["v_proj"], lora_plus_ratio=4.0)
    found = rates_of(names, OptimConfig(optimizer="sgd", lr=0.1), grouping)
    assert [found[name][:2] for name in names] == [(0.1, 0.5), (0.4, 0.5), (0.4, 0.0), (0.1, 0.5)]


def test_layers_learn_the_faster_the_nearer_to_the_end_they_are():
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(10)),
        "model.norm.weight",
        "lm_head.weight",
    ]
    grouping = Grouping(lr_multiplier=layerwise_lr_decay(0.4, 10))
    found = rates_of(names, OptimConfig(optimizer="sgd", lr=1.0), grouping)
    rates = [found[name][0] for name in names]
    # 0.4 + d/12 * 0.6, by hand; the first layer learns as the embedding does.
    want = [0.4, *(0.4 + 0.05 * layer for layer in range(10)), 1.0, 1.0]
    assert rates == pytest.approx(want)
    assert all(a <= b for a, b in pairwise(rates))


def test_matrices_have_groups_of_their_own_with_their_own_rate():
    names = ["embed_tokens.weight", "layers.0.up_proj.weight", "layers.0.norm.weight"]
    grouping = Grouping(0.1, matrices={names[1]}, muon_lr_multiplier=4.0, no_decay_params=["norm"])
    found = rates_of(names, OptimConfig(optimizer="muon", lr=0.01), grouping)
    assert found == {
        names[0]: (0.01, 0.1, False),
        names[1]: (0.04, 0.1, True),
        names[2]: (0.01, 0.0, False),
    }


def test_without_exceptions_there_is_one_group():
    [group] = parameter_groups(model().named_parameters(), Grouping(0.1))
    assert group[RATE] == 1.0


def test_a_frozen_model_cannot_be_trained():
    with pytest.raises(ConfigError, match="no parameter of the model is trainable"):
        build_optimizer(model().requires_grad_(False).named_parameters(), OptimConfig())


def test_weights_in_bf16_are_stepped_in_float32_and_rounded_once_to_the_nearest():
    """So that after one step each is the nearest number to what float32 comes to."""
    exact = model()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
            parameter.grad = torch.randn_like(parameter).bfloat16().float()
    rounded = copy.deepcopy(exact).bfloat16()
    for one, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert other.grad is not None
        one.grad = other.grad.bfloat16()
    optim = OptimConfig(lr=0.01)
    ours = build_optimizer(rounded.named_parameters(), optim)
    assert isinstance(ours, AnyPrecisionAdamW)
    for optimizer in (ours, build_optimizer(exact.named_parameters(), optim)):
        optimizer.step()
    for one, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=2**-8 * 1.001, atol=1e-9)
    states = {s["exp_avg"].dtype for s in ours.state.values()}
    assert states == {torch.float32}


def test_what_rounding_takes_is_kept_and_reaches_the_weights_in_the_end():
    def moved(precision):
        net = nn.Linear(8, 8, bias=False).bfloat16()
        nn.init.ones_(net.weight)
        told: dict[str, Argument] = {"betas": [0.0, 0.0]}
        optim = OptimConfig(optimizer="anyprecision_adamw", lr=2**-12, optimizer_kwargs=told)
        optimizer = build_optimizer(net.named_parameters(), optim, precision=precision)
        for _ in range(64):
            net.weight.grad = torch.full_like(net.weight, 0.5)
            optimizer.step()
        return 1 - net.weight.float().mean().item()

    assert moved(StatePrecision(torch.bfloat16)) == 0
    assert moved(StatePrecision(torch.bfloat16, lost="kept")) == pytest.approx(
        64 * 2**-12, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "told", "says"),
    [
        ("torch.optim.RAdamm", {}, r"Did you mean torch\.optim\.RAdam\?"),
        ("torch.optim.LBFGS", {}, "computes the loss several times"),
        ("torch.optim.Muon", {}, "write muon"),
        ("torch.optim.RAdam", {"beta": [0.9, 0.9]}, "Did you mean betas"),
        ("torch.optim.RAdam", {"betas": [0.9, 2.0]}, r"does not take .* Invalid beta"),
        ("torch.optim.RAdam", {"lr": 0.1}, r"set by train\.lr"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(name, told, says):
    with pytest.raises(ConfigError, match=says):
        named_optimizer(OptimConfig(optimizer=name, optimizer_kwargs=told))


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is here")
def test_an_optimizer_of_a_package_that_is_not_there_is_refused():
    with pytest.raises(CapabilityError, match="torchao is not installed"):
        named_optimizer(OptimConfig(optimizer="torchao.optim.AdamW8bit"))


def test_decay_that_an_optimizer_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"is 0\.1, and torch\.optim\.Rprop has no"):
        named_optimizer(OptimConfig(optimizer="torch.optim.Rprop", weight_decay=0.1))


@pytest.mark.slow
def test_an_optimizer_of_a_package_steps_as_it_does_by_itself(tmp_path):
    code = "import torch\nclass Plain(torch.optim.SGD):\n    version = 2\n    elementwise = True\n"
    entry = {"penstock.optimizers": {"plain": "plain_package:Plain"}}
    with installed(write_package(tmp_path, "plain_package", "1.0", entry, code)):
        told: dict[str, Argument] = {"momentum": 0.9}
        optim = OptimConfig(optimizer="plain", lr=0.01, optimizer_kwargs=told)
        ours, theirs = model(), model()
        after = steps(ours, build_optimizer(ours.named_parameters(), optim, Grouping(0.1)))
        with pytest.raises(ConfigError, match="Did you mean momentum"):
            named_optimizer(optim.model_copy(update={"optimizer_kwargs": {"momentun": 0.9}}))
        sharded = {"data_parallel_mode": "fsdp2", "optimizer": "plain"}
        run = loads(smallest(train=sharded))
    reference = torch.optim.SGD(theirs.parameters(), lr=0.01, weight_decay=0.1, momentum=0.9)
    torch.testing.assert_close(after, steps(theirs, reference))
    assert run.train.optimizer == "plain"
