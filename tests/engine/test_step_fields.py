"""What the settings of a step do to it: rates, updates, clipping, batches. One process each."""

import json

import numpy as np
import pytest

from tests.engine import runs
from tests.engine.loops import (
    before_each_update,
    calls_of,
    decoder_of,
    gradients_of,
    loop_of,
    parameters_of,
)
from tests.optim.test_schedule import VECTORS
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

# fp32 arithmetic on values of order one, done twice.
RTOL, ATOL = 1e-5, 1e-7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    runs.write_rows(folder / "packed", 10)
    runs.write_config(folder / "model")
    return folder


def job(folder, out, **train):
    settings = {"data_parallel_mode": "none", "max_steps": 1, **train}
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed")


def rates(job):
    """The rate that the optimizer holds at each step."""
    loop = loop_of(job)
    groups = loop.built.engine.optimizer.param_groups
    seen = before_each_update(loop, lambda: groups[0]["lr"])
    loop.run()
    return seen


@pytest.mark.parametrize(("settings", "expected"), VECTORS, ids=["cosine", "linear", "constant"])
def test_the_optimizer_and_the_metrics_have_the_schedules_rate(settings, expected, folder):
    # The vectors are of a peak of 1; the schedule is linear in its rates.
    peak = 1e-3
    names = {"decay_style": "lr_decay_style", "decay_ratio": "lr_decay_ratio"}
    written = {
        names.get(name, name if name.startswith("lr") else f"lr_{name}"): value * peak
        if name in ("lr_min", "lr_start")
        else value
        for name, value in settings.items()
    }
    out = f"rates {settings['decay_style']}"
    seen = on_ranks(1, rates, job(folder, out, lr=peak, max_steps=10, **written))[0]
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    want = [value * peak for value in expected][:10]
    assert seen[: len(want)] == pytest.approx(want, abs=1e-6 * peak)
    assert [json.loads(line)["lr"] for line in lines] == seen
    assert len(seen) == 10


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
    _, raw, _, norm = updated(folder, "free", max_grad_norm=0)
    assert norm_of(raw) == pytest.approx(norm, rel=1e-5)
    assert norm > 0.2
    _, cut, _, told = updated(folder, "cut", max_grad_norm=0.1)
    assert told == pytest.approx(norm, rel=1e-5)  # as it was before
    assert norm_of(cut) == pytest.approx(0.1, rel=1e-4)
    _, loose, _, _ = updated(folder, "loose", max_grad_norm=1000.0)
    assert norm_of(loose) == pytest.approx(norm, rel=1e-5)


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


@pytest.mark.parametrize("what", BATCHES)
def test_a_step_takes_its_rows_in_as_many_passes_as_the_batch_sizes_say(what, folder):
    train, num_passes, rows = BATCHES[what]
    written = {"enable_gradient_checkpointing": False, **train}
    data = {"pad_to_multiple_of": 64}
    [(seen, facts)] = on_ranks(1, passes, job(folder, what, data=data, max_steps=2, **written))
    assert [len(sizes) for sizes in seen] == [num_passes] * 2
    assert facts["rows_per_step"] == rows
    assert {size % 64 for sizes in seen for size in sizes} == {0}


def test_rows_are_padded_no_further_than_asked(folder):
    sizes = {}
    for multiple in (1, 64):
        data = {"pad_to_multiple_of": multiple, "sample_packing_sequence_len": 256}
        made = job(folder, f"pad {multiple}", data=data, enable_gradient_checkpointing=False)
        [(seen, facts)] = on_ranks(1, passes, made)
        sizes[multiple] = seen[0]
        assert (sum(seen[0]) == facts["tokens"]) == (multiple == 1)
    assert sizes[64] == [-(-size // 64) * 64 for size in sizes[1]]


@pytest.mark.parametrize(("drop", "steps"), [(True, 2), (False, 3)])
def test_rows_that_do_not_fill_a_step_are_left_out_or_not(drop, steps, folder):
    data = {"dataloader_drop_last": drop}
    made = job(folder, f"last {drop}", data=data, max_steps=None, num_train_epochs=2)
    [facts] = on_ranks(1, runs.train_here, made)
    assert facts["steps"] == 2 * steps  # of ten rows, four at a time
    assert facts["epochs"] == 2


def test_max_steps_ends_a_run_before_and_after_its_epochs(folder):
    for wanted in (1, 5):
        made = job(folder, f"max {wanted}", max_steps=wanted, num_train_epochs=1)
        [facts] = on_ranks(1, runs.train_here, made)
        assert facts["steps"] == wanted


def start_and_first_row(job):
    loop = loop_of(job)
    seen = calls_of(decoder_of(loop), lambda arguments: arguments[0].tolist())
    start = parameters_of(loop)["model.embed_tokens.weight"]
    loop.run()
    return start, seen[0]


def test_the_seed_decides_the_start_and_the_order(folder):
    found = [
        on_ranks(1, start_and_first_row, job(folder, f"seed {number}", seed=seed))[0]
        for number, seed in enumerate((7, 7, 8))
    ]
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not np.array_equal(found[0][0], found[2][0])
    assert found[0][1] != found[2][1]
