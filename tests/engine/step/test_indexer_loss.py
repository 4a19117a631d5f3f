"""The loss of indexers: its formula on what the layers read, alone and in any layout."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.activations.checkpointing import apply_activation_checkpointing
from penstock.engine.validate_model import validate_model
from penstock.models.decoder import Decoder
from penstock.models.layers.indexer import LOSS, Indexer, IndexerLoss
from penstock.models.registry import get_family
from penstock_kernels.attention import VarlenMetadata
from tests.engine import runs
from tests.engine.inputs import MODELS
from tests.engine.loops import each, loop_of, parameters_of, step
from tests.engine.predicting import Predicting
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

SHAPE = {**MODELS["sparse attention"], "num_hidden_layers": 3, "num_attention_heads": 8}
INDEXER = ".indexer."
# The package has a function of that name.
indexer_loss = import_module("penstock_kernels.sparse_attention.indexer_loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexer_loss")
    runs.write_rows(folder / "packed", 4)
    runs.write_model(folder / "model", noise=0.3, **SHAPE)
    return folder


def job(folder, out, **train):
    # Every step is of all rows.
    steps = {"lr": 0.05, "optimizer": "sgd", "max_steps": 3, "global_batch_size": 4}
    settings = {"indexer_loss_coef": 1.0, **steps, **train}
    model = {"model_path": str(folder / "model"), **settings.pop("model", {})}
    where = Path(model["model_path"])
    run = runs.run_config(folder / out, where, model=model, **settings)
    return runs.job_of(run, folder / "packed")


def trained(job):
    """Losses, norms and indexer losses of the steps, and the weights before and after."""
    loop = loop_of(job)
    before = parameters_of(loop)
    told = []
    for _ in range(3):
        record = step(loop)
        told.append((record["loss"], record["grad_norm"], record.get("indexer_loss")))
    return told, before, parameters_of(loop)


def changed(before, after):
    return {name for name in before if not np.array_equal(before[name], after[name])}


def test_indexers_learn_and_the_other_weights_do_what_they_did_without(folder):
    jobs = {
        "with": job(folder, "with", data_parallel_mode="none"),
        "without": job(folder, "without", data_parallel_mode="none", indexer_loss_coef=0.0),
        "warm": job(folder, "warm", data_parallel_mode="none", indexer_warmup=True, lr=1.0),
    }
    [found] = on_ranks(1, each, trained, jobs)
    (told, before, after), (plain, _, frozen) = found["with"], found["without"]
    assert told[0][0] == plain[0][0], "the loss is that of the tokens"
    assert all(one > 0 for *_, one in told)
    assert [one for *_, one in plain] == [None] * 3
    of_indexers = {name for name in before if INDEXER in name}
    assert changed(before, after) > of_indexers
    assert not changed(before, frozen) & of_indexers
    told, before, after = found["warm"]
    assert changed(before, after) == of_indexers
    divergences = [one for *_, one in told]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.98 * divergences[0]
    # Nothing that the token losses read has changed; rows are added in another order.
    assert [loss for loss, *_ in told] == [pytest.approx(told[0][0], rel=1e-6)] * 3


LAYOUTS = {
    "shard": {"data_parallel_mode": "fsdp2", "enable_gradient_checkpointing": True},
    "pp": {"pipeline_parallel_size": 2},
    "tp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "ring": {"ringattn_parallel_size": 2},
    "reentrant": {"enable_reentrant": True, "enable_gradient_checkpointing": True},
    "ep": {"expert_parallel_size": 2},
    "ulysses": {"ulysses_parallel_size": 2},
}


@one_day_in(2, of=0)
@pytest.mark.parametrize(
    ("how", "layouts"),
    [
        ({}, [*LAYOUTS][:2]),
        pytest.param({}, [*LAYOUTS][2:], marks=pytest.mark.exhaustive),
        pytest.param({"indexer_warmup": True}, [*LAYOUTS], marks=pytest.mark.exhaustive),
        pytest.param({"mtp_loss_weight": 0.3}, [*LAYOUTS], marks=pytest.mark.exhaustive),
    ],
    ids=["plain", "more", "warm-up", "predicting"],
)
def test_every_layout_trains_them_alike(folder, how, layouts):
    model = "predicting" if how.get("mtp_loss_weight") else "model"
    if model == "predicting" and not (folder / model).exists():
        Predicting("deepseek_v32").save(folder / model)
    how = {**how, "model": {"model_path": str(folder / model)}}
    kept = {"data_parallel_mode": "none", "enable_gradient_checkpointing": False}
    of_one = {"alone": job(folder, f"alone, {model}", **kept, **how)}
    [alone] = on_ranks(1, each, trained, of_one)
    wanted, _, weights = alone["alone"]
    jobs = {name: job(folder, f"{name}, {model}", **LAYOUTS[name], **how) for name in layouts}
    for name, (told, _, after) in on_ranks(2, each, trained, jobs)[0].items():
        np.testing.assert_allclose(told, wanted, rtol=2e-5, err_msg=name)
        for tensor, array in after.items():
            np.testing.assert_allclose(array, weights[tensor], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"enable_compile": True}, "indexer_loss_coef.*enable_compile"),
        ({"lora": {"enable_lora": True}}, "indexer_loss_coef.* lora.enable_lora"),
        ({"indexer_warmup": True, "indexer_loss_coef": 0.0}, "indexer_warmup.* nothing would be"),
    ],
    ids=["compiled", "adapters", "warm-up"],
)
def test_what_it_does_not_do_is_refused(folder, settings, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        job(folder, "refused", **settings)


def test_a_model_without_indexers_has_no_such_loss(folder):
    run = job(folder, "none").config
    hf = {**json.loads((folder / "model/config.json").read_text()), "model_type": "deepseek_v3"}
    with pytest.raises(CapabilityError, match="indexer_loss_coef is 1, and a deepseek_v3 has no"):
        validate_model(run, hf)


def test_a_run_in_bf16_trains_them(folder):
    its = {"enable_mixed_precision": True, "data_parallel_mode": "none"}
    [(told, before, after)] = on_ranks(1, trained, job(folder, "bf16", **its))
    assert all(torch.tensor(one).isfinite().all() for one in told)
    assert any(INDEXER in name for name in changed(before, after))


@pytest.mark.parametrize("kind", ["plain", "reentrant", "once"])
def test_a_recomputed_layer_computes_its_loss_once(kind, monkeypatch):
    config = get_family({**runs.TINY, **SHAPE}).read({**runs.TINY, **SHAPE})
    torch.manual_seed(0)
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, Indexer):
            module.requires_grad_(True)
    calls = []
    compute = indexer_loss._attention_weights
    monkeypatch.setattr(
        indexer_loss, "_attention_weights", lambda *args: calls.append(1) or compute(*args)
    )
    ids = torch.randint(0, runs.VOCAB, (30,))
    positions = torch.arange(30)

    def computed():
        calls.clear()
        model.zero_grad()
        loss = IndexerLoss(0.5, 30)
        segments = replace(VarlenMetadata.of([30]), memo={LOSS: loss})
        model(ids, positions, segments, lambda hidden, _: hidden.square().sum()).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return torch.stack([*loss.sums.values()]), gradients

    wanted, gradients = computed()
    apply_activation_checkpointing(model, None, kind)
    found, again = computed()
    assert len(calls) == config.num_hidden_layers
    assert torch.equal(found.sort()[0], wanted.sort()[0])
    for name, gradient in gradients.items():
        assert torch.equal(again[name], gradient), name
