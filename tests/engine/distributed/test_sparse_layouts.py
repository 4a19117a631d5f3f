"""What sparse attention does not support is refused before any work, and what is frozen is told."""

import json

import pytest
import torch

from penstock.adapters.match_targets import linear_layers
from penstock.config.loading.load import loads
from penstock.core.errors import CapabilityError
from penstock.engine.build import checked_family
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.validate_model import require_prompts_apart, validate_model
from penstock.estimate.machine import check_model, with_prompts_apart
from penstock.models.decoder import Decoder
from penstock.models.registry import get_family
from tests.config.values import smallest
from tests.engine import runs
from tests.engine.inputs import MODELS, SHAPE

MODEL = {**runs.TINY, **SHAPE, **MODELS["sparse attention"]}


def run_of(folder, nproc=1, data=None, **train):
    (folder / "config.json").write_text(json.dumps(MODEL))
    sections = {"data": data or {}, "launch": {"nproc_per_node": nproc}, "train": train}
    return loads(smallest(model={"config_path": str(folder)}, **sections))


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"dropout": {"attention": 0.1}}, r"train\.dropout\.attention is 0\.1, .* indexer"),
        ({"qk_clip_threshold": 100.0, "optimizer": "muon"}, "qk_clip_threshold is 100, .* indexer"),
    ],
    ids=["dropout", "clip"],
)
def test_what_goes_by_all_attention_weights_is_refused(tmp_path, train, says):
    run = run_of(tmp_path, **train)
    for refuse in (lambda: validate_model(run, MODEL), lambda: check_model(run)):
        with pytest.raises(CapabilityError, match=says):
            refuse()


def test_prompts_are_not_shared_unless_that_is_written_which_is_refused(tmp_path):
    data = {"datasets": [{"path": "dummy", "type": "preference"}]}
    run = run_of(tmp_path, 1, data, objective="preference")
    apart, notes = with_prompts_apart(run)
    assert not apart.data.shares_prompts
    assert "sparse attention cannot share them" in notes[0]
    written = run_of(tmp_path, 1, {**data, "share_prompts": True}, objective="preference")
    with pytest.raises(CapabilityError, match=r"Write data\.share_prompts: false"):
        require_prompts_apart(written.data, MODEL)


def test_an_indexer_is_frozen_has_no_adapters_and_is_told(tmp_path):
    said: list[str] = []
    alone = ProcessInfo(0, 0, 1, torch.device("cpu"))
    family = checked_family(run_of(tmp_path), MODEL, None, alone, said.append)
    assert any("indexers are frozen; they select 6 tokens" in line for line in said)
    config = family.read(MODEL)
    with torch.device("meta"):
        model = Decoder(config, merge_qkv=False)
    of_indexers = {n: p for n, p in model.named_parameters() if ".indexer." in n}
    assert len(of_indexers) == 5 * config.num_hidden_layers
    assert not any(parameter.requires_grad for parameter in of_indexers.values())
    names = get_family(MODEL).weight_map(config, merge_qkv=False)
    adapted = {layer.name for layer in linear_layers(names)}
    assert any(name.endswith("q_b_proj") for name in adapted)
    assert not any("indexer" in name for name in adapted)
