"""Learning from preferences: the same in every layout, and what TRL computes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.errors import ArtifactError
from penstock.rows.ref_logprobs import write_scores
from penstock.rows.schema import DIGEST_BYTES
from penstock.train.eval import reference_model
from penstock.train.eval.reference_model import SyncedRefModel
from penstock.train.launch.job import Job
from tests.engine import loops, runs
from tests.engine.inputs import write_rows
from tests.engine.laid import Layout, alone
from tests.engine.layouts import LAYOUTS
from tests.engine.loops import each
from tests.engine.losses.answering import random_samples, write_answers, write_reference
from tests.engine.traces import Errors, errors, trace_here
from tests.ranks import on_ranks
from tests.turns import one_day_in

LIMITS = Errors(loss=2e-6, norm=1e-5, gradients=1e-5, weights=1e-6)

CORE = ["shard 2", "ring 2", "tp 2, sequence parallel", "pp 2"]
"""Every axis."""
MORE = {
    2: ["replicate 2, ddp", "ulysses 2", "tp 2, logits gathered", "ep 2 over shard 2"],
    4: ["pp 2 x ring 2", "ring 2 x ulysses 2", "shard 2 x tp 2"],
}

PAIRS = random_samples(56, runs.VOCAB)
JUDGED = random_samples(56, runs.VOCAB, judged=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    write_rows(folder / "packed", 2)
    for name, samples in {"preference": PAIRS, "kto": JUDGED}.items():
        write_answers(folder / name, samples)
        write_reference(folder / f"{name} scores", samples)
    return folder


def job_of(folder, layout: Layout, out: str, loss: str, **preference) -> Job:
    kind = "kto" if loss == "kto" else "preference"
    job = layout.job(
        folder,
        out,
        objective="preference",
        data={"pad_to_multiple_of": 1, "datasets": [{"path": "dummy", "type": kind}]},
        preference={
            **{"loss_type": loss, "sft_loss_ratio": 0.1},
            **{"sft_loss_scope": "prompt_and_answer", **preference},
        },
    )
    return replace(job, packed_dir=folder / kind, ref_logprobs=folder / f"{kind} scores")


@pytest.fixture(scope="module")
def reference(folder):
    known = {}

    def made(layout, loss):
        key = layout.name, loss
        if key not in known:
            known[key] = on_ranks(1, trace_here, job_of(folder, layout, f"{key}", loss))[0]
        return known[key]

    return made


def check(names, loss, folder, reference):
    [world] = {LAYOUTS[name].world for name in names}
    jobs = {name: job_of(folder, LAYOUTS[name], f"{name} {loss}", loss) for name in names}
    found = on_ranks(world, each, trace_here, jobs, timeout=200, collectives="checked")[0]
    for name in names:
        far = errors(found[name], reference(LAYOUTS[name].alone, loss))
        assert far.within(LIMITS), f"{name}: {far}"


@pytest.mark.dist
@one_day_in(3, of=1)
def test_a_layout_learns_from_pairs_what_one_process_does(folder, reference):
    check(CORE, "sigmoid", folder, reference)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("world", MORE)
def test_other_layouts_learn_from_pairs_what_one_process_does(world, folder, reference):
    check(MORE[world], "sigmoid", folder, reference)


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.slow
def test_a_layout_compares_judged_answers_with_the_same_baseline(folder, reference):
    check(CORE, "kto", folder, reference)


def moved_and_resumed(job: Job) -> tuple[list[dict], dict]:
    """The first steps, and the last of them once more, from a checkpoint before it."""
    loop = loops.loop_of(job)
    records = [loops.step(loop) for _ in range(3)]
    loops.save(loop)
    records.append(loops.step(loop))
    again = loops.loop_of(job)
    again._resume()
    return records, loops.step(again)


@pytest.mark.dist
@pytest.mark.slow
def test_the_model_becomes_its_own_reference_every_so_many_steps(folder):
    job = job_of(folder, alone("tied"), "moving", "sigmoid", ref_update_steps=2)
    [(records, again)] = on_ranks(1, moved_and_resumed, job)
    moved = [abs(record["rewards/margins"]) > 1e-3 for record in records]
    # At first it is compared with scores that are not its own.
    assert moved == [True, True, False, True]
    assert {n: again[n] for n in ("loss", "rewards/margins")} == {
        n: records[-1][n] for n in ("loss", "rewards/margins")
    }


class OneRank:
    """A process alone, as far as references ask."""

    is_main_process = True

    def any_rank(self, flag):
        return flag

    def barrier(self):
        pass


def test_references_are_those_of_the_last_update_however_many_there_were(tmp_path, monkeypatch):
    sample, every = b"s" * DIGEST_BYTES, 7
    scored = SimpleNamespace(now=0)

    def iter_chunks(_):
        yield SimpleNamespace(samples=[sample], logprobs=np.full((1, 2), -float(scored.now)))

    scorer = SimpleNamespace(iter_chunks=iter_chunks)
    monkeypatch.setattr(reference_model, "LogprobScorer", lambda *_: scorer)
    write_scores(tmp_path / "initial", [sample], np.full((1, 2), 1.0))
    preference = SimpleNamespace(ref_update_steps=every)
    job: Any = SimpleNamespace(
        ref_logprobs=tmp_path / "initial",
        config=SimpleNamespace(preference=preference),
        output_dir=tmp_path,
    )
    unused: Any = None
    batches: Any = SimpleNamespace(rows=lambda _: np.zeros(1), advance=lambda cursor: cursor)
    batch: Any = SimpleNamespace(branching=SimpleNamespace(samples=(sample,)))

    def started():
        return SyncedRefModel(job, unused, cast("Any", OneRank()), unused, batches)

    def found(model, step):
        scored.now = step
        model.on_step_start(step, unused)
        [scores] = model.lookup([batch])
        return scores.tolist()

    whole = started()
    # Over the ends of numbers of one and of two digits.
    for step in range(1, 110):
        last = step - step % every
        assert found(whole, step) == [[-last or 1.0] * 2]
        # From a checkpoint since the update, or since the one before.
        for at in {step, max(step - every, 1)} if step % every else ():
            its = at - at % every
            assert found(started(), at) == [[-its or 1.0] * 2]
    with pytest.raises(ArtifactError, match="step_14 has no reference log-probs"):
        found(started(), 15)
    kept = {path.name for path in (tmp_path / "references").iterdir()}
    assert kept == {"step_98", "step_105"}
