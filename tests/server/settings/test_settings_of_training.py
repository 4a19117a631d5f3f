"""Settings of a server's file that its workers heed in ways of their own, over tiny models."""

import asyncio
from unittest.mock import patch

import pytest
import torch

from penstock.config.server.config import ServerConfig, to_run_config
from penstock.server.protocol.requests import CreateModel, CreateSession
from penstock.server.protocol.types import LoraConfig
from penstock.server.protocol.worker_commands import CreateModelCommand
from penstock.server.worker.__main__ import served_by
from penstock.server.worker.batching import BatchDispatcher
from penstock.server.worker.datums import build_samples
from penstock_kernels.op import Op
from tests.engine.runs import VOCAB
from tests.server.engine_house import house
from tests.server.workers.orders import (
    data,
    done,
    opening,
    operations,
    passing,
    saved,
    saving,
    stepping,
)

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def test_clients_are_told_of_the_model_as_it_is_written(model, tmp_path):
    settings = {"model_path": str(model), "model_name": "mine", "tokenizer_path": "a tokenizer"}
    config = ServerConfig.model_validate(settings | {"enable_lora": True})
    substrate = operations(model, tmp_path, lora={"lora_rank": 4}).models.substrate
    told = served_by(config, "elsewhere", substrate)
    assert (told.base_model, told.tokenizer) == ("mine", "a tokenizer")
    assert (told.trains, told.max_rank, told.vocab_size) == ("adapters", 4, VOCAB)
    whole = operations(model, tmp_path, lora={"enable_lora": False}).models.substrate
    told = served_by(ServerConfig(model_path="org/m"), "elsewhere", whole)
    assert (told.base_model, told.tokenizer) == ("org/m", "org/m")
    assert (told.trains, told.max_rank) == ("all weights", 0)


def test_a_model_is_asked_for_by_the_name_of_the_file(tmp_path):
    names = ServerConfig(model_path="org/m", model_name="mine").base_names

    def asked(name):
        return CreateModel(session="s", model=name[-4:], base_model=name, lora=LoraConfig(rank=8))

    async def check():
        async with house(tmp_path, base_names=names) as here:
            await here.client.do(CreateSession(session="s"))
            await here.client.do(asked("mine"))
            assert (await here.client.fails(asked("another"))).code == "invalid"

    asyncio.run(check())


def test_an_adapter_is_as_the_file_says_where_its_client_does_not(model, tmp_path):
    workers = operations(model, tmp_path, seed=11, lora={"lora_rank": 4, "lora_alpha": 24})
    workers.do(CreateModelCommand(model="a", lora=None))
    adapter = workers.models.get("a").adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.seed) == (4, 24, 11)
    workers.do(opening("b", 2, alpha=3.0, seed=5))
    adapter = workers.models.get("b").adapter
    assert adapter is not None
    assert (adapter.rank, adapter.alpha, adapter.seed) == (2, 3.0, 5)


MUON = {"optimizer": "muon", "optimizer_dtype": "fp32"}

OTHERS = {
    "optimizer": {"optimizer": "sgd", "optimizer_dtype": "fp32"},
    "optimizer_dtype": {**MUON, "optimizer_dtype": "bf16"},
    "muon_lr": {**MUON, "muon_lr": 0.5},
    "muon_momentum": {**MUON, "muon_momentum": 0.5},
    "muon_nesterov": {**MUON, "muon_nesterov": False},
    "muon_ns_steps": {**MUON, "muon_ns_steps": 1},
    "muon_adjust_lr_fn": {**MUON, "muon_adjust_lr_fn": "match_rms_adamw"},
}


def learnt(model, out, **settings):
    """A model's weights after two steps, where all weights are trained by these settings."""
    passes = [passing("a", data(2, seed=number)) for number in range(2)]
    steps = [order for each in passes for order in (each, stepping("a"))]
    orders = [CreateModelCommand(model="a", lora=None), *steps, saving("a", out)]
    done(model, out, orders, lora={"enable_lora": False}, **settings)
    return saved(out)


@pytest.fixture(scope="module")
def by_muon(model, tmp_path_factory):
    return learnt(model, tmp_path_factory.mktemp("muon"), **MUON)


@pytest.mark.parametrize("field", OTHERS)
def test_a_setting_of_the_optimizer_changes_what_is_learnt(model, tmp_path, by_muon, field):
    found = learnt(model, tmp_path, **OTHERS[field])
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(found[name], by_muon[name])


def test_matrices_learn_at_the_rate_of_the_file_under_muon(model, tmp_path):
    settings = {**MUON, "muon_lr": 0.25, "lora": {"enable_lora": False}}
    workers = operations(model, tmp_path, **settings)
    for order in (
        CreateModelCommand(model="a", lora=None),
        passing("a", data(2)),
        stepping("a", 0.01),
    ):
        workers.do(order)
    groups = workers.models.get("a").optimizer.param_groups
    rates = {round(group["lr"], 6) for group in groups if group["params"]}
    assert rates == {0.25, 0.01}


@pytest.mark.parametrize(("mode", "by_kernels"), [("eager", False), ("chunked", True)])
def test_the_head_is_computed_as_is_written(model, tmp_path, mode, by_kernels):
    workers = operations(model, tmp_path, ce_mode=mode)
    asked, call = set(), Op.__call__

    def counted(op, *arguments, **options):
        asked.add(op.name)
        return call(op, *arguments, **options)

    workers.do(opening("a"))
    with patch.object(Op, "__call__", counted):
        workers.do(passing("a", data(2)))
    # What reads logits, a chunk of them at a time.
    assert ("tally" in asked) == by_kernels


PADDED = {
    "each for itself": ({"pad_to_multiple_of": 16}, [32, 48]),
    "of its own multiple": ({"pad_to_multiple_of": 64}, [64, 64]),
    "to the longest in a pipeline": (
        {"pad_to_multiple_of": 16, "pipeline_parallel_size": 2},
        [48, 48],
    ),
    "to a full row": (
        {
            "pad_to_multiple_of": 16,
            "pipeline_parallel_size": 2,
            "pp_variable_seq_lengths": False,
            "sample_packing_sequence_len": 96,
        },
        [96, 96],
    ),
}


@pytest.mark.parametrize("case", PADDED)
def test_rows_are_filled_up_as_is_written(case):
    settings, lengths = PADDED[case]
    run = to_run_config(
        ServerConfig.model_validate(
            {"model_path": "org/m", "sample_packing_sequence_len": 128, **settings}
        )
    )
    by_length = {one.tokens.shape[0]: one for one in data(60, longest=60)}
    order = passing("a", (by_length[20], by_length[47]))
    dealt = BatchDispatcher(run, num_replicas=1, replica=0).build_micro_batches(
        build_samples(order, VOCAB), [(0,), (1,)]
    )
    assert [len(one.batch.input_ids_T) for one in dealt] == lengths
