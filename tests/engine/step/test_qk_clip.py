"""QK-clip: logits as transformers computes them, before and after, and every layout alike."""

import json

import numpy as np
import pytest
import torch
import transformers

from penstock.config.loading.load import ConfigError
from penstock.core.errors import CapabilityError
from penstock.engine.validate_model import validate_model
from penstock.rows.reader import PackedRows
from tests.engine import runs
from tests.engine.inputs import MODELS
from tests.engine.loops import each, loop_of, parameters_of, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2}
THRESHOLD = 15.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qk_clip")
    runs.write_rows(folder / "packed", 4)
    runs.write_model(folder / "model", noise=0.3, **QWEN2)
    return folder


def job(folder, out, **train):
    settings = {"qk_clip_threshold": THRESHOLD, "optimizer": "sgd", "max_steps": 2, **train}
    model = {"model_path": str(folder / "model"), **settings.pop("model", {})}
    run = runs.run_config(folder / out, folder / "model", model=model, **settings)
    return runs.job_of(run, folder / "packed")


def two_steps(job):
    loop = loop_of(job)
    told, weights = [], []
    for _ in range(2):
        record = step(loop)
        told.append((record["max_attention_logit"], record["clipped_heads"]))
        weights.append(parameters_of(loop))
    return told, weights


def largest_logits(folder, weights):
    """Of each layer and head in transformers' model with these weights, over all documents."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.load_state_dict({n: torch.tensor(a) for n, a in weights.items()}, strict=False)
    found = [torch.full((4,), -torch.inf) for _ in range(2)]

    def attend(module, query, key, value, _mask, scaling, **_):
        key = key.repeat_interleave(2, 1)
        scores = query @ key.mT * scaling
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        largest = scores.amax((0, 2, 3))
        found[module.layer_idx] = torch.maximum(found[module.layer_idx], largest)
        y = scores.softmax(-1) @ value.repeat_interleave(2, 1)
        return y.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("observed", attend)
    model.set_attn_implementation("observed")
    rows = PackedRows(folder / "packed" / "data" / "train")
    with torch.no_grad():
        for number in range(4):
            row = rows.row(number)
            ids = torch.tensor(row.input_ids, dtype=torch.int64)
            for document in ids.split(row.lengths.tolist()):
                model(input_ids=document[None], use_cache=False)
    return torch.stack(found).numpy()


def test_heads_over_the_threshold_come_down_to_it_and_the_others_stay(folder):
    # The optimizer moves nothing: what changes is clipped.
    [still] = on_ranks(1, two_steps, job(folder, "still", data_parallel_mode="none", lr=0))
    [(first, clipped), (second, again)], [weights, _] = still
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    before = {name: p.detach().numpy() for name, p in start.named_parameters()}
    logits = largest_logits(folder, before)
    assert 0 < clipped == (logits > THRESHOLD).sum() < logits.size
    assert first == pytest.approx(logits.max(), rel=1e-5)
    # Later layers read what the first one makes of its tokens now.
    after = largest_logits(folder, weights)
    np.testing.assert_allclose(after[0], np.minimum(logits[0], THRESHOLD), rtol=1e-4)
    assert second == pytest.approx(after.max(), rel=1e-5)
    assert again == (after > 1.001 * THRESHOLD).sum()
    same = [name for name in before if ".q_proj." not in name and ".k_proj." not in name]
    assert all(np.array_equal(before[name], weights[name]) for name in same if name in weights)


def test_latent_attention_comes_down_to_it(folder):
    shape = {**MODELS["dense latent attention"], "num_hidden_layers": 1, "num_attention_heads": 8}
    runs.write_model(folder / "latent", noise=0.3, **shape)
    run = runs.run_config(
        folder / "of latent",
        folder / "latent",
        model={"model_path": str(folder / "latent")},
        **{"qk_clip_threshold": 10.0, "optimizer": "sgd", "lr": 0, "max_steps": 2},
        data_parallel_mode="none",
    )
    [(told, _)] = on_ranks(1, two_steps, runs.job_of(run, folder / "packed"))
    (first, clipped), (second, _) = told
    assert first > 12
    assert clipped
    assert second == pytest.approx(10.0, rel=1e-5)


LAYOUTS = {
    2: {
        "shard": {"enable_gradient_checkpointing": False},
        "tp": {"tensor_parallel_size": 2, "model": {"merge_qkv": False}},
        "pp": {"pipeline_parallel_size": 2},
        "reentrant": {"enable_reentrant": True, "optimizer_offload": "cpu"},
    },
    4: {"key heads on two ranks": {"tensor_parallel_size": 4}},
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_layers_clip_alike(folder):
    jobs = {
        name: job(folder, name, data_parallel_mode="none", enable_compile=compiled)
        for name, compiled in (("eager", False), ("compiled", True))
    }
    [found] = on_ranks(1, each, two_steps, jobs)
    [(told, [_, want]), (here, [_, got])] = found["eager"], found["compiled"]
    assert told == [(pytest.approx(logit, rel=1e-5), clipped) for logit, clipped in here]
    for tensor, array in want.items():
        np.testing.assert_allclose(got[tensor], array, rtol=1e-4, atol=1e-5, err_msg=tensor)


@one_day_in(3, of=2)
def test_every_layout_clips_alike(folder):
    alone = job(folder, "alone", data_parallel_mode="none")
    [(told, [_, weights])] = on_ranks(1, two_steps, alone)
    assert told[1][1]
    for world, layouts in LAYOUTS.items():
        jobs = {name: job(folder, name, **more) for name, more in layouts.items()}
        for name, (here, [_, found]) in on_ranks(world, each, two_steps, jobs)[0].items():
            assert [n for _, n in here] == [n for _, n in told], name
            for tensor, array in weights.items():
                np.testing.assert_allclose(
                    found[tensor], array, rtol=1e-4, atol=1e-5, err_msg=f"{name}: {tensor}"
                )


@pytest.mark.parametrize(
    "more",
    [
        {"lora": {"enable_lora": True}},
        {"ringattn_parallel_size": 2},
        {"ulysses_parallel_size": 2},
        {"fuse_optimizer_step": True, "max_grad_norm": 0},
    ],
)
def test_what_leaves_it_without_effect_is_refused(more, folder):
    with pytest.raises(ConfigError, match="qk_clip_threshold"):
        job(folder, "refused", **more)


def test_a_model_with_qk_norm_is_refused(folder):
    runs.write_config(folder / "normed")
    run = job(folder, "normed").config
    with pytest.raises(CapabilityError, match="QK norm"):
        validate_model(run, json.loads((folder / "normed" / "config.json").read_text()))
