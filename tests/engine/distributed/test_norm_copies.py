"""What several ranks hold counts once in a gradient norm: each of them counts its share."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.checkpoint.train_state import TrainState
from penstock.engine.distributed.param_shards import (
    LocalParam,
    TensorShard,
    full_shard,
    make_local_param,
)
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.optim.clip_grad import gradient_norm
from penstock.engine.optim.optimizer_in_backward import OptimizerInBackward

WIDTH = 4


class OneOfMany(ProcessInfo):
    """A rank that speaks for itself: a total is its own part."""

    def all_reduce_sum(self, value):
        return value


RANKS = OneOfMany(0, 0, 1, torch.device("cpu"))


class Copied(LocalParam):
    """A parameter that three ranks hold, which compute other tokens with it."""

    @property
    def num_replicas(self):
        return 3


def rows(name, start, count, copies):
    return TensorShard(name, (count, WIDTH), (0, 0), (count, WIDTH), start, copies)


def test_copies_that_differ_by_piece_count_as_a_share_of_all_their_ranks():
    parameter = nn.Parameter(torch.zeros(6, WIDTH))
    parameter.grad = torch.randn(6, WIDTH)
    # Fused projections: key heads lie on more ranks than query heads do.
    pieces = (rows("q", 0, 4, 1), rows("k", 4, 2, 2))
    norm = gradient_norm([Copied("qkv", parameter, pieces, None)], RANKS)
    squares = parameter.grad.double().square().sum(1)
    expected = squares[:4].sum() / 3 + squares[4:].sum() / 6
    assert norm.item() == pytest.approx(expected.sqrt().item(), rel=1e-6)


def test_the_norm_of_a_fused_step_counts_copies_as_a_share():
    parameter = nn.Parameter(torch.randn(3, WIDTH))
    held = Copied("w", parameter, (full_shard("w", (3, WIDTH)),), None)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    fused = OptimizerInBackward(optimizer, [held], RANKS, PreUpdateHooks())
    weight = torch.randn(3, WIDTH)
    (parameter * weight).sum().backward()
    expected = weight.double().square().sum() / 3
    assert fused.norm().item() == pytest.approx(expected.sqrt().item(), rel=1e-6)
    assert parameter.grad is None


def test_exact_parameters_are_saved_as_they_are_where_others_are_rounded():
    router, weight = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2))
    held = [
        make_local_param(name, one, (full_shard(name, one.shape),))
        for name, one in (("router", router), ("weight", weight))
    ]
    optimizer = torch.optim.SGD([router, weight], lr=0.1)
    trained = TrainState(held, optimizer, only_trained=False, rounded_to=torch.bfloat16)
    boxes = replace(trained, exact=frozenset({id(router)})).boxes()
    [exact], [rounded] = boxes["model.router"], boxes["model.weight"]
    assert exact.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
