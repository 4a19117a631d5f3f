"""What optimizers are said to remember, beside what they do."""

import pytest
import torch
from torch import nn

from penstock.config.loading.load import loads
from penstock.engine.optim.build import build_state_precision
from penstock.estimate.costs.optimizer_states import state_bytes
from penstock.estimate.costs.param_sizes import Tensor
from penstock.optim.build import build_optimizer
from penstock.optim.groups import Grouping
from tests.config.values import smallest

ROWS, COLUMNS = 48, 64
CASES = {
    "adamw": {},
    "adamw of weights in bf16": {"precision": "bf16"},
    "states in bf16": {"optimizer": "anyprecision_adamw"},
    "states in fp32": {"optimizer": "anyprecision_adamw", "optimizer_dtype": "fp32"},
    "what rounding takes": {
        "optimizer": "anyprecision_adamw",
        "optimizer_kwargs": {"use_kahan_summation": True},
        "precision": "bf16",
    },
    "plain": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}},
    "muon": {"optimizer": "muon"},
    "novograd": {"optimizer": "novograd"},
    "novograd in fp32": {"optimizer": "novograd", "optimizer_dtype": "fp32"},
    "another": {"optimizer": "torch.optim.RAdam"},
    "factors": {"optimizer": "torch.optim.Adafactor", "data_parallel_mode": "none"},
}


@pytest.mark.parametrize("case", CASES)
def test_states_take_what_is_told(case):
    train = loads(smallest(train=CASES[case])).train
    dtype = getattr(torch, train.keeps_in)
    weight = nn.Parameter(torch.randn(ROWS, COLUMNS, dtype=dtype))
    name = "model.layers.0.mlp.up_proj.weight"
    grouping = Grouping(matrices={name} if train.optimizer == "muon" else set())
    optimizer = build_optimizer(
        [(name, weight)], train, grouping, precision=build_state_precision(train, [])
    )
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    size = sum(value.numel() * value.element_size() for value in kept if value.numel() > 1)
    told = Tensor(0, ROWS, COLUMNS, True, dtype.itemsize, 2, 1, is_hidden_matrix=True)
    assert state_bytes(train, told) == pytest.approx(size)
