"""Preference training on images: losses and gradients as transformers computes them, in any layout,
and the stage of reference log-probs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.models.multimodal import text_name
from penstock.reference.samples import iter_rows
from penstock.train.eval.reference_logprobs import LogprobScorer
from tests.engine import loops
from tests.engine.vision.pairs import (
    BETA,
    dpo_loss,
    image_pairs,
    log_probs,
    write_pairs,
    write_reference,
)
from tests.engine.vision.steps import image_job, loaded, write_model
from tests.ranks import on_ranks

ALONE = {"data_parallel_mode": "none"}
APART = {"data": {"share_prompts": False}}
ONE = {"shared": ALONE, "apart": {**ALONE, **APART}}
TWO = {
    "fsdp2 2": {"data_parallel_shard_size": 2},
    "tp 2, sequence parallel, apart": {
        **{"tensor_parallel_size": 2, "sequence_parallel": True},
        **APART,
    },
}
MORE = {
    "fsdp2 2, apart": {"data_parallel_shard_size": 2, **APART},
    "tp 2": {"tensor_parallel_size": 2},
    "ring 2": {"ringattn_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "ddp 2, frozen tower": {
        **{"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2},
        "model": {"freeze": ["vision"]},
    },
    "fsdp2 2, two rows": {"data_parallel_shard_size": 2, "micro_batch_size": 2},
}
BACKEND = {"model": {"freeze": [], "backend": "transformers"}, **APART}


def pair_job(folder, name, model_type, **train):
    """A run on the pairs in `folder`."""
    data = {
        "datasets": [{"path": "dummy", "type": "preference"}],
        **train.pop("data", {}),
    }
    job = image_job(
        folder,
        name,
        model_type,
        objective="preference",
        preference={"beta": BETA},
        max_grad_norm=0,
        max_steps=1,
        data=data,
        **train,
    )
    form = "apart" if data.get("share_prompts") is False else "shared"
    return replace(job, packed_dir=folder / form, ref_logprobs=folder / "scores")


def preference_steps(jobs, wanted):
    """Loss and gradients of each run's step, and the log-probs of some samples before it."""
    found = {}
    for name, job in jobs.items():
        loop = loops.loop_of(job)
        scorer = LogprobScorer(job.config, loop.built, loop.ranks)
        scored = [*scorer.iter_chunks(iter_rows(job.packed_dir, wanted))]
        seen = loops.before_each_update(loop, lambda loop=loop: loops.gradients_of(loop))
        record = loops.step(loop)
        found[name] = {
            "loss": record["loss"],
            "grad_norm": record["grad_norm"],
            "gradients": seen[0],
            "scores": {
                sample: score
                for each in scored
                for sample, score in zip(each.samples, each.logprobs.tolist(), strict=True)
            },
        }
    return found


@pytest.fixture
def compared(tmp_path):
    """A function that compares the runs of a model type with transformers."""

    def compare(model_type, layouts, world):
        model = loaded(write_model(tmp_path / model_type, model_type))
        pairs = image_pairs(model_type)
        for form in ("shared", "apart"):
            write_pairs(tmp_path / form, pairs, shares=form == "shared")
        reference = write_reference(tmp_path / "scores", pairs, model)
        some = pairs[1::2]
        jobs = {name: pair_job(tmp_path, name, model_type, **how) for name, how in layouts.items()}
        found = on_ranks(world, preference_steps, jobs, [pair.digest for pair in some])
        loss = dpo_loss(model, pairs, reference)
        loss.backward()
        theirs = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        norm = np.sqrt(sum((one**2).sum() for one in theirs.values()))
        with torch.no_grad():
            scores = {pair.digest: [one.item() for one in log_probs(model, pair)] for pair in some}
        for ranks in found:
            for name, run in ranks.items():
                assert run["loss"] == pytest.approx(loss.item(), rel=1e-5), name
                assert run["scores"].keys() == scores.keys()
                for sample, wanted in scores.items():
                    assert run["scores"][sample] == pytest.approx(wanted, rel=1e-5), name
                if "frozen" not in name:
                    assert run["grad_norm"] == pytest.approx(norm, rel=1e-5), name
                    assert len(run["gradients"]) >= len(theirs)
                assert_equal_gradients(run["gradients"], theirs, name)

    return compare


def assert_equal_gradients(ours, theirs, name):
    """Of each tensor, relative to its norm; of what is 0 but for rounding, digits differ."""
    least = 1e-7 * max(np.linalg.norm(one) for one in theirs.values())
    named = {one if one in ours else text_name(one): wanted for one, wanted in theirs.items()}
    for tensor, found in ours.items():
        # Of what no loss reaches, transformers has no gradient, and here it may be zeros.
        wanted = named.get(tensor, np.zeros(1))
        error = np.linalg.norm(found - wanted)
        assert error <= 1e-5 * np.linalg.norm(wanted) + least, f"{name}: {tensor}"


@pytest.mark.dist
def test_pairs_are_compared_as_by_transformers_packed_and_apart(compared):
    compared("qwen3_vl", ONE, 1)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "llava", "qwen3_5", "gemma3"])
def test_pairs_are_compared_so_in_every_layout(compared, model_type):
    layouts = {**TWO, **MORE}
    # States of linear attention have all tokens before; image tokens of gemma3 see one another.
    if model_type in ("qwen3_5", "gemma3"):
        layouts = {name: how for name, how in layouts.items() if "apart" in name}
    if model_type == "qwen3_vl":  # features are added after layers of the second stage
        layouts.pop("pp 2")
    compared(model_type, layouts, 2)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["qwen2_vl", "llava"])
@pytest.mark.parametrize("world", [1, 2])
def test_pairs_are_compared_so_by_the_models_own_code(compared, model_type, world):
    how = ALONE if world == 1 else {"data_parallel_shard_size": 2}
    compared(model_type, {"one": {**how, **BACKEND}}, world)
