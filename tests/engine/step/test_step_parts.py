"""The parts of a step are called at the same moments, in the order of their list."""

import dataclasses

import numpy as np
import pytest
import torch

from penstock.core.errors import StageError
from penstock.engine.distributed.param_shards import local
from penstock.engine.step_part import StepPart
from tests.engine import runs
from tests.engine.loops import each, loop_of, parameters_of, step
from tests.engine.predicting import Predicting
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist


class Spy(StepPart):
    """Writes down the moments of a step, and what its tensors are then."""

    def __init__(self, name, seen, ranks, *, overflows=False, skips=False):
        self.name: str = name
        self.seen, self.ranks = seen, ranks
        self.overflows, self.skips = overflows, skips

    def note(self, moment, step):
        has_grads = any(one.parameter.grad is not None for one in step.model.trainable)
        self.seen.append((moment, self.name, has_grads))

    def before_forward(self, step):
        self.note("before_forward", step)

    def after_backward(self, step):
        self.note("after_backward", step)
        if self.overflows and self.ranks.rank == 0:
            gradient = step.model.trainable[0].parameter.grad
            assert gradient is not None
            local(gradient).view(-1)[0] = float("inf")
        sizes = {"first": 1, "last": 2}
        values = torch.arange(sizes[self.name], dtype=torch.float64)
        return 10 * self.ranks.rank + values + len(self.name)

    def skips_update(self, step):
        self.note("skips_update", step)
        return self.skips

    def before_update(self, step):
        self.note("before_update", step)

    def after_update(self, step):
        self.note("after_update", step)

    def finish(self, step, totals):
        self.note("finish", step)
        return {self.name: totals}


def observed(job, **spy):
    """The moments of a step between two spies, its record, and whether the weights changed."""
    loop = loop_of(job)
    engine, seen = loop.built.engine, []
    spies = [Spy("first", seen, loop.ranks, **spy), Spy("last", seen, loop.ranks)]
    parts = [spies[0], *engine.parts, spies[1]]
    loop.built = dataclasses.replace(loop.built, engine=dataclasses.replace(engine, parts=parts))
    before, fault = parameters_of(loop), None
    record = None
    try:
        record = step(loop)
    except StageError as error:
        fault = str(error)
    after = parameters_of(loop)
    changed = any(not np.array_equal(before[name], after[name]) for name in before)
    return seen, record, changed, fault


def observed_all(job):
    return (
        observed(job),
        observed(job, overflows=True, skips=True),
        observed(job, overflows=True),
    )


def test_every_moment_calls_the_parts_in_order_and_totals_are_summed_over_ranks(tmp_path):
    runs.write_rows(tmp_path / "packed", 8)
    runs.write_config(tmp_path / "model")
    run = runs.run_config(tmp_path / "out", tmp_path / "model", data_parallel_mode="fsdp2")
    updated, skipped, failed = on_ranks(2, observed_all, runs.job_of(run, tmp_path / "packed"))[0]

    def moments(*names):
        with_grads = {"after_backward", "skips_update", "before_update"}
        # The optimizer's step keeps the gradients, which are freed before `finish`.
        with_grads.add("after_update")
        return [(name, part, name in with_grads) for name in names for part in ("first", "last")]

    seen, record, changed, fault = updated
    assert seen == moments(
        "before_forward", "after_backward", "before_update", "after_update", "finish"
    )
    assert (record["first"], record["last"]) == ([5.0 + 15.0], [4.0 + 14.0, 5.0 + 15.0])
    assert changed
    assert fault is None

    seen, record, changed, fault = skipped
    # One part that skips the update is enough.
    assert [name for name, part, _ in seen if part == "first"] == [
        *("before_forward", "after_backward", "skips_update", "finish")
    ]
    assert record["grad_norm"] == 0.0
    assert not changed

    seen, record, changed, fault = failed
    assert seen == moments("before_forward", "after_backward", "skips_update")
    assert record is None
    assert not changed
    assert fault.startswith("the gradient norm of step 1 is inf; the weights were left as they")


def names_of_parts(job):
    return [type(part).__name__ for part in loop_of(job).built.engine.parts]


def test_parts_stand_in_an_order_in_which_none_reads_what_a_later_one_changes(tmp_path):
    runs.write_rows(tmp_path / "packed", 4)
    runs.write_config(tmp_path / "dense")
    Predicting("deepseek_v32").save(tmp_path / "sparse")
    Predicting("deepseek_v3").save(tmp_path / "latent")
    added = {
        **{"precision": "fp16_mixed", "enable_mixed_precision": True, "mtp_loss_weight": 0.3},
        **{"indexer_loss_coef": 1.0, "moe_aux_loss_coef": 0.1, "log_grad_norm": "layers"},
    }
    settings = {
        "added": ("sparse", added),
        "bounded": ("latent", {"optimizer_offload": "cpu", "qk_clip_threshold": 10.0}),
        "merged": ("dense", {"lora": {"enable_lora": True, "merge_lora_interval": 2}}),
        "fused": ("dense", {"fuse_optimizer_step": True, "max_grad_norm": 0}),
    }
    jobs = {}
    for name, (model, train) in settings.items():
        folder = tmp_path / model
        path = {} if model == "dense" else {"model_path": str(folder)}
        run = runs.run_config(
            tmp_path / name,
            folder,
            model=path,
            data_parallel_mode="none",
            gradient_accumulation_steps=1,
            micro_batch_size=4,
            **train,
        )
        jobs[name] = runs.job_of(run, tmp_path / "packed")
    [found] = on_ranks(1, each, names_of_parts, jobs)
    assert found["added"] == [
        *("GradScaler", "TokenLoss", "MTPLoss", "IndexerLosses", "GradClipping"),
        *("ChangedWeights", "Routers", "Norms"),
    ]
    assert found["bounded"] == [
        *("TokenLoss", "GradClipping", "QKClip", "CPUOffloadedParams", "ChangedWeights", "Routers")
    ]
    assert found["merged"] == ["TokenLoss", "GradClipping", "ChangedWeights", "ReLoRA"]
    assert found["fused"] == ["TokenLoss", "OptimizerInBackward", "GradClipping", "ChangedWeights"]
