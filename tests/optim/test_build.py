"""Optimizers and their groups, judged by torch.optim set up by hand."""

import copy

import pytest
import torch
from torch import nn

from penstock.core.errors import ConfigError
from penstock.optim.build import build_optimizer
from penstock.optim.groups import parameter_groups


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def steps(net, optimizer):
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
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


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_training_is_torchs_with_groups_made_by_hand(name):
    ours, theirs = model(), model()
    optimizer = build_optimizer(
        ours.named_parameters(),
        optimizer=name,
        lr=0.01,
        weight_decay=0.1,
        no_decay_modules=["1"],
        no_decay_params=["bias"],
    )
    reference = (
        by_hand(theirs, torch.optim.AdamW, 0.1, betas=(0.9, 0.95), eps=1e-8)
        if name == "adamw"
        else by_hand(theirs, torch.optim.SGD, 0.1)
    )
    before = [parameter.clone() for parameter in copy.deepcopy(ours).parameters()]
    after = steps(ours, optimizer)
    torch.testing.assert_close(after, steps(theirs, reference), rtol=1e-6, atol=1e-7)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_names_decide_the_groups_and_frozen_parameters_are_left_out():
    net = model()
    net[2].weight.requires_grad_(False)
    groups = parameter_groups(net.named_parameters(), 0.1, no_decay_params=["bias"])
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [["0.weight", "1.weight"], ["0.bias", "1.bias", "2.bias"]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_second_factors_learn_faster_in_groups_of_their_own_whatever_decays():
    names = [
        "layers.0.q_proj.lora_A.q_proj",
        "layers.0.q_proj.lora_B.q_proj",
        "layers.0.v_proj.lora_B.v_proj",
        "model.embed_tokens.lora_B.embed_tokens",
    ]
    named = [(name, nn.Parameter(torch.ones(1))) for name in names]
    optimizer = build_optimizer(
        named,
        optimizer="sgd",
        lr=0.1,
        weight_decay=0.5,
        no_decay_params=["v_proj"],
        lora_plus_ratio=4.0,
    )
    called = {id(parameter): name for name, parameter in named}
    found = {
        called[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert [found[name] for name in names] == [(0.1, 0.5), (0.4, 0.5), (0.4, 0.0), (0.1, 0.5)]


def test_without_exceptions_there_is_one_group():
    assert len(parameter_groups(model().named_parameters(), 0.1)) == 1


def test_a_frozen_model_cannot_be_trained():
    with pytest.raises(ConfigError, match="no parameter of the model is trainable"):
        build_optimizer(model().requires_grad_(False).named_parameters(), optimizer="sgd", lr=1.0)
