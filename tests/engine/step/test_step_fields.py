"""What the settings of a step do to it: rates, updates, clipping, batches. One process each."""

import json

import numpy as np
import pytest

from tests.engine import runs
from tests.engine.loops import (
    before_each_update,
    calls_of,
    decoder_of,
    each,
    gradients_of,
    loop_of,
    parameters_of,
    step,
)
from tests.optim.test_schedule import VECTORS
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

job = runs.short_job

# fp32 arithmetic on values of order one, done twice.
RTOL, ATOL = 1e-5, 1e-7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    runs.write_rows(folder / "packed", 10)
    runs.write_config(folder / "model")
    return folder


def rates(job):
    """The rate that the optimizer holds at each step."""
    loop = loop_of(job)
    groups = loop.built.engine.optimizer.param_groups
    seen = before_each_update(loop, lambda: groups[0]["lr"])
    loop.run()
    return seen


def of_a_peak(peak, settings):
    """Settings of the schedule with another peak; its rates are linear in those written."""
    return {
        name: value * peak if name in ("lr_min", "lr_start") else value
        for name, value in settings.items()
    }


@one_day_in(3, of=0)
def test_the_optimizer_and_the_metrics_have_the_schedules_rate(folder):
    peak = 1e-3
    jobs = {
        name: job(folder, name, lr=peak, max_steps=10, **of_a_peak(peak, settings))
        for name, (settings, _) in VECTORS.items()
    }
    [found] = on_ranks(1, each, rates, jobs)
    for name, (_, expected) in VECTORS.items():
        want = [value * peak for value in expected][:10]
        assert len(found[name]) == 10
        assert found[name][: len(want)] == pytest.approx(want, abs=1e-6 * peak), name
        lines = (jobs[name].output_dir / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["lr"] for line in lines] == found[name]


def one_update(job):
    """Parameters before and after one step, and the gradients it took."""
    loop = loop_of(job)
    before = parameters_of(loop)
    seen = before_each_update(loop, lambda: gradients_of(loop))
    loop.run()
    record = json.loads((job.output_dir / "metrics.jsonl").read_text())
    return before, seen[0], parameters_of(loop), record["grad_norm"]


def updated(folder, out, **train):
    return on_ranks(1, one_update, job(folder, out, **train))[0]


def norm_of(gradients):
    return np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))


def test_sgd_subtracts_the_gradient_and_decays_all_but_what_is_exempt(folder):
    lr, decay = 0.5, 0.25
    before, gradients, after, _ = updated(
        folder,
        "sgd",
        optimizer="sgd",
        lr=lr,
        weight_decay=decay,
        no_decay_modules=["layernorm"],
        no_decay_params=["down_proj.weight"],
    )
    exempt = {n for n in before if "layernorm" in n or "down_proj" in n}
    assert 0 < len(exempt) < len(before)
    for name, weight in before.items():
        shrunk = weight if name in exempt else weight * (1 - lr * decay)
        want = shrunk - lr * gradients[name]
        np.testing.assert_allclose(after[name], want, rtol=RTOL, atol=ATOL, err_msg=name)


def test_without_another_word_the_optimizer_is_adamw(folder):
    lr, decay = 0.01, 0.1
    before, gradients, after, _ = updated(folder, "adamw", lr=lr, weight_decay=decay)
    for name, weight in before.items():
        # The first step of Adam is its gradient over its gradient's magnitude.
        step = gradients[name] / (np.abs(gradients[name]) + 1e-8)
        want = weight * (1 - lr * decay) - lr * step
        np.testing.assert_allclose(after[name], want, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_longer_than_the_limit_are_cut_to_it_and_0_is_no_limit(folder):
    limits = (0.0, 0.1, 1000.0)
    jobs = {str(limit): job(folder, f"limit {limit}", max_grad_norm=limit) for limit in limits}
    [found] = on_ranks(1, each, one_update, jobs)
    norms = {limit: norm_of(gradients) for limit, (_, gradients, _, _) in found.items()}
    assert norms["0.0"] > 0.2
    assert norms["0.1"] == pytest.approx(0.1, rel=1e-4)
    assert norms["1000.0"] == pytest.approx(norms["0.0"], rel=1e-5)
    for _, _, _, told in found.values():
        assert told == pytest.approx(norms["0.0"], rel=1e-5)  # as it was before


def passes(job):
    """For each step of the optimizer, the number of tokens in each forward pass before it."""
    loop = loop_of(job)
    sizes = calls_of(decoder_of(loop), lambda arguments: len(arguments[0]))
    seen = before_each_update(loop, lambda: (sizes[:], sizes.clear())[0])
    facts = loop.run()
    return seen, facts


BATCHES = {
    "one row at a time": ({"global_batch_size": 4}, 4, 4),
    "two rows at a time": ({"global_batch_size": 4, "micro_batch_size": 2}, 2, 4),
    "three passes of two": (
        {"global_batch_size": None, "micro_batch_size": 2, "gradient_accumulation_steps": 3},
        3,
        6,
    ),
}


def test_a_step_takes_its_rows_in_as_many_passes_as_the_batch_sizes_say(folder):
    kept = {"enable_gradient_checkpointing": False, "max_steps": 2}
    jobs = {what: job(folder, what, **kept, **train) for what, (train, _, _) in BATCHES.items()}
    [found] = on_ranks(1, each, passes, jobs)
    for what, (_, num_passes, rows) in BATCHES.items():
        seen, facts = found[what]
        assert [len(sizes) for sizes in seen] == [num_passes] * 2, what
        assert facts["rows_per_step"] == rows


def test_rows_are_padded_no_further_than_asked(folder):
    jobs = {
        str(multiple): job(
            folder,
            f"pad {multiple}",
            data={"pad_to_multiple_of": multiple},
            enable_gradient_checkpointing=False,
        )
        for multiple in (1, 64)
    }
    [found] = on_ranks(1, each, passes, jobs)
    [exact], facts = found["1"]
    assert sum(exact) == facts["tokens"]
    [padded], facts = found["64"]
    assert padded == [-(-size // 64) * 64 for size in exact]
    assert facts["tokens"] == sum(exact)


def test_rows_that_do_not_fill_a_step_are_left_out_or_not(folder):
    jobs = {
        str(drop): job(
            folder,
            f"drop {drop}",
            data={"dataloader_drop_last": drop},
            max_steps=None,
            num_train_epochs=epochs,
        )
        for drop, epochs in ((True, 2), (False, 3))
    }
    [found] = on_ranks(1, each, runs.train_here, jobs)
    # Of ten rows, four at a time.
    assert (found["True"]["steps"], found["True"]["epochs"]) == (2 * 2, 2 * 0.8)
    assert (found["False"]["steps"], found["False"]["epochs"]) == (3 * 3, 3)


def test_max_steps_ends_a_run_before_and_after_its_epochs(folder):
    jobs = {str(wanted): job(folder, f"max {wanted}", max_steps=wanted) for wanted in (1, 5)}
    [found] = on_ranks(1, each, runs.train_here, jobs)
    assert {wanted: facts["steps"] for wanted, facts in found.items()} == {"1": 1, "5": 5}


def start_and_first_row(job):
    """Of the first step: the embeddings it starts from, and the tokens it reads first."""
    loop = loop_of(job)
    seen = calls_of(decoder_of(loop), lambda arguments: arguments[0].tolist())
    start = parameters_of(loop)["model.embed_tokens.weight"].tolist()
    step(loop)
    return start, seen[0]


def test_the_seed_decides_the_start_and_the_order(folder):
    seeds = {"one": 7, "same": 7, "other": 8}
    jobs = {name: job(folder, f"seed {name}", seed=seed) for name, seed in seeds.items()}
    [found] = on_ranks(1, each, start_and_first_row, jobs)
    assert found["one"] == found["same"]
    for mine, theirs in zip(found["one"], found["other"], strict=True):
        assert mine != theirs
