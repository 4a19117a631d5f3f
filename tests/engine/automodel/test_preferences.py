"""Preference losses of transformers' models are those of our decoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.estimate.machine import with_prompts_apart
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.train.launch.job import Job
from tests.engine import loops, runs
from tests.engine.automodel import examine, tiny_models
from tests.engine.losses.answering import random_samples, write_answers, write_reference
from tests.ranks import on_ranks

LOSSES = {"sigmoid": {}, "orpo": {}, "simpo": {"simpo_gamma": 0.5}, "kto": {}}
KINDS = {"native": True, "transformers": False}
"""Backends, and whether prompts are shared."""


def _write_samples(folder: Path) -> None:
    for kind in ("preference", "kto"):
        samples = random_samples(14, runs.VOCAB, judged=kind == "kto")
        write_reference(folder / f"{kind} scores", samples)
        for shares in KINDS.values():
            write_answers(folder / f"{kind} {shares}", samples, shares_prompts=shares)


def _job(model: Path, backend: str, loss: str) -> Job:
    kind = "kto" if loss == "kto" else "preference"
    shares = KINDS[backend]
    job = examine.job_of(
        model,
        f"{backend} {loss}",
        objective="preference",
        data_parallel_shard_size=1,
        max_grad_norm=0.0,
        model={"model_path": str(model), "backend": backend},
        data={
            "pad_to_multiple_of": 1,
            "datasets": [{"path": "dummy", "type": kind}],
            "share_prompts": shares,
        },
        preference={"loss_type": loss, **LOSSES[loss]},
    )
    folder = model.parent
    scores = folder / f"{kind} scores" if job.config.preference.has_reference else None
    return replace(job, packed_dir=folder / f"{kind} {shares}", ref_logprobs=scores)


def _first_step(job: Job) -> tuple[dict[str, float], loops.Arrays]:
    loop = loops.loop_of(job)
    gradients = loops.before_each_update(loop, lambda: loops.gradients_of(loop))
    record = loops.step(loop)
    numbers = {n: v for n, v in record.items() if "loss" in n or n.startswith("rewards/")}
    return numbers, gradients[0]


def _each(model: Path) -> dict[str, list[tuple[dict[str, float], loops.Arrays]]]:
    found = {
        loss: [_first_step(_job(model, backend, loss)) for backend in KINDS] for loss in LOSSES
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            AutoCausalLM, "_packed", lambda self, ids, _, them: self._padded(ids, them, None)
        )
        found["sigmoid"].append(_first_step(_job(model, "transformers", "sigmoid")))
    return found


@pytest.mark.slow
def test_preference_losses_and_their_gradients_are_those_of_our_decoder(tmp_path):
    _write_samples(tmp_path)
    tiny_models.write_model(tmp_path / "model", "llama", num_hidden_layers=1)
    [found] = on_ranks(1, _each, tmp_path / "model")
    for loss, ((numbers, gradients), *others) in found.items():
        for these, of_these in others:
            assert these == pytest.approx(numbers, rel=1e-5), loss
            assert of_these.keys() == gradients.keys()
            for name, value in gradients.items():
                error = np.linalg.norm(of_these[name] - value) / np.linalg.norm(value)
                assert error <= 1e-5, f"{loss}: {name}: {error}"


@pytest.mark.parametrize(("backend", "shares"), [("transformers", False), ("auto", True)])
def test_prompts_are_not_shared_by_default_where_the_backend_cannot(tmp_path, backend, shares):
    runs.write_config(tmp_path)
    data: dict[str, Any] = {"datasets": [{"path": "dummy", "type": "preference"}]}
    changes = {"objective": "preference", "model": {"backend": backend}}
    run = runs.run_config(tmp_path / "out", tmp_path, data=data, **changes)
    resolved, notes = with_prompts_apart(run)
    assert resolved.data.shares_prompts is shares
    assert len(notes) == (not shares)
    data["share_prompts"] = True
    written = runs.run_config(tmp_path / "out", tmp_path, data=data, **changes)
    assert with_prompts_apart(written) == (written, ())
