"""What ends a run, which of its checkpoints is its result, and saves that fail on the way."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.schema.checkpoint import SaveBestConfig
from penstock.config.schema.duration import EarlyStoppingConfig
from penstock.core.errors import StageError
from penstock.engine.checkpoint import checkpoint_manager
from penstock.engine.checkpoint.folders import CheckpointNaming
from penstock.rows.batches import StepSampler
from penstock.rows.reader import PackedRows
from penstock.train import duration
from penstock.train.checkpointing import TrainerState
from penstock.train.duration import Duration, build_duration
from penstock.train.eval.early_stopping import EarlyStopping
from penstock.train.launch.stop_request import StopRequest
from penstock.train.launch.upload_selection import files_to_download, files_to_upload
from penstock.train.metrics.jsonl import read_metrics
from penstock.train.trainer import GO_ON, STOP
from tests.engine import runs
from tests.engine.loops import each, loop_of
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    runs.write_rows(folder / "packed", 10)
    runs.write_rows(folder / "packed", 3, seed=1, split="validation")
    runs.write_config(folder / "model")
    return folder


def job(folder, out, **train):
    settings = {"data_parallel_mode": "none", **train}
    data = {"val_set_size": 3, **settings.pop("data", {})}
    run = runs.run_config(folder / out, folder / "model", data=data, **settings)
    return runs.job_of(run, folder / "packed")


def read(job):
    return list(read_metrics(job.output_dir / "metrics.jsonl"))


LENGTHS = {
    # Of ten rows, four at a time, two that fill no step left out: two steps in an epoch.
    "half an epoch": ({"num_train_epochs": 0.5}, 1, "num_train_epochs"),
    "an epoch and a little": ({"num_train_epochs": 1.1}, 3, "num_train_epochs"),
    "two epochs and a half": ({"num_train_epochs": 2.5}, 5, "num_train_epochs"),
    "steps": ({"max_steps": 3}, 3, "max_steps"),
    "steps before tokens": ({"max_steps": 1, "max_tokens": 10**9}, 1, "max_steps"),
    "tokens before steps": ({"max_steps": 9, "max_tokens": 1}, 1, "max_tokens"),
}


@pytest.mark.slow
def test_a_run_is_as_long_as_is_written_and_its_rate_falls_to_that_end(folder):
    falling = {"lr_decay_style": "linear", "lr_min": 0.0}
    jobs = {what: job(folder, what, **falling, **its) for what, (its, _, _) in LENGTHS.items()}
    tokens = int(PackedRows(folder / "packed" / "data" / "train").lengths().sum()) * 2
    jobs["tokens"] = job(folder, "tokens", max_tokens=tokens, **falling)
    [found] = on_ranks(1, each, runs.train_here, jobs)
    for what, (_, steps, ended_by) in LENGTHS.items():
        assert (found[what]["steps"], found[what]["ended_by"]) == (steps, ended_by), what
    seen = np.cumsum([record["tokens"] for record in read(jobs["tokens"]) if "loss" in record])
    assert seen[-2] < tokens <= seen[-1] == found["tokens"]["tokens"]
    assert len(seen) > 4
    for what, made in jobs.items():
        rates = [record["lr"] for record in read(made) if "loss" in record]
        shares = 1 - np.arange(len(rates)) / len(rates)
        assert rates == pytest.approx(list(runs.LR * shares)), what


class StopAt(StopRequest):
    """Asks to stop when a loop has taken so many steps."""

    def __init__(self, loop, step):
        super().__init__()
        self.loop, self.step = loop, step

    def __bool__(self):
        return self.loop.at.step == self.step


def timed(job):
    """Two starts of a run on whose clock every look takes five minutes; the first one is asked to
    stop after two steps."""
    clock, time = itertools.count(0, 300), duration.time
    duration.time = SimpleNamespace(monotonic=lambda: next(clock))
    try:
        loop = loop_of(job)
        loop.stop = StopAt(loop, 2)
        first = loop.run()
        return first, loop.clock.seconds, runs.train_here(job)
    finally:
        duration.time = time


def test_time_is_counted_over_all_starts_and_the_run_then_ends_well(folder):
    made = job(folder, "timed", max_hours=1.0, num_train_epochs=99)
    [(first, seconds, facts)] = on_ranks(1, timed, made)
    assert first is None
    assert 0 < seconds < 3600
    assert facts["ended_by"] == "max_hours"
    assert 2 < facts["steps"] < 12
    assert facts["eval_loss"] == read(made)[-1]["eval_loss"]
    state = json.loads((made.output_dir / facts["checkpoint"] / "state.json").read_text())
    assert state["step"] == facts["steps"]
    assert 3600 <= state["seconds"] < 2 * 3600


def tell(loop, losses):
    """Let evaluations find these losses, one after the other; the fourth is the most accurate."""
    found = enumerate(losses)

    def evaluate(is_asked_to_stop):
        assert not is_asked_to_stop()
        number, loss = next(found)
        accuracy = -abs(number - 3)
        return {"eval_loss": loss, "eval_perplexity": 1.0, "eval_token_accuracy": accuracy}

    loop.held_out.evaluate = evaluate


LOSSES = [5.0, 4.0, 4.5, 3.99, 4.2, 3.9, 4.1, 4.3, 4.4, 1.0]


def judged(job):
    """The facts of a run whose evaluations find LOSSES, and its checkpoints."""
    loop = loop_of(job)
    tell(loop, LOSSES)
    facts = loop.run()
    root = loop.saves.root
    names = sorted(int(path.name[12:]) for path in root.iterdir() if path.is_dir())
    best = (root / "best").read_text() if (root / "best").exists() else None
    return facts, names, best


JUDGED = {
    "patient": ({"early_stopping": {"patience": 3}}, 9, None),
    "impatient": ({"early_stopping": {"patience": 1}}, 3, None),
    # 3.99 and 3.9 are no better than 4 by 0.2.
    "demanding": ({"early_stopping": {"patience": 3, "min_delta": 0.2}}, 5, None),
    "accurate": ({"early_stopping": {"metric": "eval_token_accuracy", "patience": 1}}, 5, None),
    "best": ({"save_best": {"metric": "eval_loss"}, "save_total_limit": 1, "max_steps": 9}, 9, 6),
    "worst": (
        {
            "save_best": {"metric": "eval_loss", "mode": "max"},
            "save_total_limit": 1,
            "max_steps": 9,
        },
        9,
        1,
    ),
    "both": (
        {
            "save_best": {"metric": "eval_loss"},
            "save_total_limit": 1,
            "early_stopping": {"patience": 2},
        },
        8,
        6,
    ),
}


@one_day_in(2, of=0)
def test_a_run_ends_when_nothing_gets_better_and_its_best_checkpoint_is_its_result(folder):
    jobs = {
        what: job(folder, what, eval_steps=1, **{"max_steps": 10, **its})
        for what, (its, _, _) in JUDGED.items()
    }
    [found] = on_ranks(1, each, judged, jobs)
    for what, (its, steps, best) in JUDGED.items():
        facts, saved, named = found[what]
        assert facts["steps"] == steps, what
        assert facts["ended_by"] == ("early_stopping" if "early_stopping" in its else "max_steps")
        result = best or steps
        assert facts["checkpoint"] == f"checkpoints/global_step_{result}", what
        assert facts["eval_loss"] == LOSSES[result - 1]
        assert named == (f"global_step_{best}\n" if best else None), what
        assert saved == ([best, steps] if best else [steps]), what


def going_on(jobs):
    whole = judged(jobs["whole"])
    loop = loop_of(jobs["parts"])
    tell(loop, LOSSES[:7])
    # Asked during the seventh step.
    loop._stop_flag = lambda: STOP if loop.at.step == 6 else GO_ON
    assert loop.run() is None
    again = loop_of(jobs["parts"])
    # What was found after seven steps is owed.
    tell(again, LOSSES[6:])
    return whole, again.run()


@pytest.mark.slow
def test_a_run_that_goes_on_remembers_what_was_best_and_how_long_it_waited(folder):
    its = {
        "eval_steps": 1,
        "save_best": {"metric": "eval_loss"},
        "early_stopping": {"patience": 3},
        "max_steps": 10,
    }
    jobs = {
        name: job(folder, f"goes on {name}", save_total_limit=1, **its)
        for name in ("whole", "parts")
    }
    [((whole, saved, best), parts)] = on_ranks(1, going_on, jobs)
    assert (whole["steps"], whole["best_step"], best) == (9, 6, "global_step_6\n")
    assert parts == whole
    assert saved == [6, 9]


def without_room(jobs):
    """Runs on a disk that is full in the middle of their second save, in the middle of the last
    one, and while the best one is named."""
    write, point = checkpoint_manager.write_boxes, checkpoint_manager._write_best_file

    def failing(at):
        def write_some(boxes, folder, group):
            written = write(boxes, folder, group)
            if at in folder.name:
                raise OSError(28, "No space left on device")
            return written

        return write_some

    def no_name(*_):
        raise OSError(28, "No space left on device")

    told = {}
    for name, its in jobs.items():
        checkpoint_manager.write_boxes = failing("_5." if name == "last" else "_2.")
        checkpoint_manager._write_best_file = no_name if name == "nameless" else point
        try:
            told[name] = runs.train_here(its)
        except StageError as error:
            told[name] = str(error)
    checkpoint_manager.write_boxes, checkpoint_manager._write_best_file = write, point
    told["last, again"] = runs.train_here(jobs["last"])
    return told


@one_day_in(2, of=0)
def test_a_save_that_fails_on_the_way_is_told_and_the_run_goes_on(folder):
    its = {"max_steps": 5, "save_steps": 1}
    jobs = {
        "at once": job(folder, "room", **its),
        "behind": job(folder, "room behind", save_async=True, **its),
        "last": job(folder, "last", **its),
        "nameless": job(
            folder, "nameless", **{**its, "eval_steps": 1, "save_best": {"metric": "eval_loss"}}
        ),
    }
    [told] = on_ranks(1, without_room, jobs)
    for name in ("at once", "behind", "nameless"):
        assert told[name]["steps"] == 5, name
        root = jobs[name].output_dir / "checkpoints"
        saved = sorted(path.name for path in root.iterdir())
        assert saved == [f"global_step_{step}" for step in (1, 3, 4, 5)], name
        warnings = [r["warning"] for r in read(jobs[name]) if "warning" in r]
        assert any("checkpoints is full (" in text for text in warnings), name
        losses = [record["step"] for record in read(jobs[name]) if "loss" in record]
        assert losses == [1, 2, 3, 4, 5], name
    assert "the checkpoint of step 5 could not be written: " in told["last"]
    assert "checkpoints is full (" in told["last"]
    assert told["last, again"]["steps"] == 5
    assert [r["step"] for r in read(jobs["last"]) if "loss" in r] == [1, 2, 3, 4, 5]


def test_what_is_no_number_is_never_the_best():
    judge = EarlyStopping(SaveBestConfig(metric="eval_loss"), EarlyStoppingConfig(patience=2))
    assert not judge.is_best({"eval_loss": float("nan")})
    judge.update({"eval_loss": float("nan")})
    assert not judge.should_stop
    assert judge.is_best({"eval_loss": 9.0})
    judge.update({"eval_loss": 9.0})
    judge.best = {"step": 1, "eval_loss": 9.0}
    assert not judge.is_best({"eval_loss": float("nan")})
    for _ in range(2):
        judge.update({"eval_loss": float("nan")})
    assert judge.should_stop


@given(
    losses=st.lists(st.integers(0, 12).map(lambda quarters: quarters / 4), max_size=12),
    patience=st.integers(1, 3),
    margin=st.sampled_from([0.0, 0.25, 0.5]),
    falls=st.booleans(),
)
def test_a_wait_starts_anew_with_what_is_better_by_more_than_the_margin(
    losses, patience, margin, falls
):
    metric = "eval_loss" if falls else "eval_token_accuracy"
    stopping = EarlyStoppingConfig(metric=metric, patience=patience, min_delta=margin)
    judge = EarlyStopping(SaveBestConfig(), stopping)
    bettered, lowest = -1, math.inf
    for number, loss in enumerate(losses):
        judge.update({metric: loss if falls else -loss})
        if lowest - loss > margin:
            bettered, lowest = number, loss
        assert judge.should_stop == (number - bettered >= patience)
        # Whether the run goes on here makes no difference.
        state = json.loads(json.dumps(judge.state_dict()))
        judge = EarlyStopping(SaveBestConfig(), stopping)
        judge.load_state_dict(state)


@pytest.mark.parametrize("most", [None, 4])
def test_a_number_of_tokens_ends_a_run_at_one_step_from_wherever_it_goes_on(folder, most):
    rows = PackedRows(folder / "packed" / "data" / "train")
    lengths = rows.lengths()
    train = job(folder, "goes on", max_tokens=int(2.5 * lengths.sum()), max_steps=most).config.train
    batches = StepSampler(lengths, rows_per_step=4, seed=7, last_batch="drop")
    at, found = TrainerState(batches.start()), []
    assert train.max_tokens is not None
    while at.tokens < train.max_tokens and at.step != most:
        found.append(build_duration(train, batches, lengths, at))
        numbers = batches.rows(at.cursor).tolist()
        at = TrainerState(
            batches.advance(at.cursor),
            at.step + 1,
            at.tokens + int(lengths[numbers].sum()),
            at.trained_tokens + sum(int((rows.row(n).labels >= 0).sum()) for n in numbers),
        )
    assert 0 < at.trained_tokens < at.tokens
    assert at.step == most or at.tokens >= train.max_tokens
    assert found == [Duration(at.step, "max_steps" if most else "max_tokens")] * at.step
    assert len(found) > 3


def test_another_machine_fetches_the_best_checkpoint_beside_the_newest(tmp_path):
    names = ["metrics.jsonl", "samples.jsonl", "report.html", "checkpoints/best"]
    for step, files in ((2, "BEST"), (4, "BEST"), (6, ""), (8, ""), (10, "unfinished")):
        folder = f"checkpoints/global_step_{step}"
        names += [f"{folder}/state.json", *([f"{folder}/BEST"] if files == "BEST" else [])]
        names += [] if files == "unfinished" else [f"{folder}/COMPLETE"]
    found = files_to_download(names, tmp_path, CheckpointNaming())
    assert found[-1] == "checkpoints/global_step_8/COMPLETE"
    assert set(found) == {
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints/best",
        *(f"checkpoints/global_step_4/{file}" for file in ("state.json", "BEST", "COMPLETE")),
        *(f"checkpoints/global_step_8/{file}" for file in ("state.json", "COMPLETE")),
    }


@pytest.mark.parametrize("order", [sorted, lambda group: sorted(group, reverse=True)])
def test_an_upload_broken_off_anywhere_leaves_no_checkpoint_to_fetch_that_is_not_whole(
    tmp_path, order
):
    there, whole = tmp_path / "there", {}
    for step in (2, 4):
        folder = there / "checkpoints" / f"global_step_{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        for name in ("A.distcp", "z.distcp", "COMPLETE"):
            (folder / name).touch()
        names = {path.relative_to(there).as_posix() for path in folder.iterdir()}
        whole[f"checkpoints/{folder.name}/COMPLETE"] = names
    sent, seen = set(), []
    # The files of a group are sent at once, so they come in any order.
    for path in (path for group in files_to_upload(there) for path in order(group)):
        sent.add(path.relative_to(there).as_posix())
        found = files_to_download(sent, tmp_path / "elsewhere", CheckpointNaming())
        if found:
            assert whole[found[-1]] <= set(found)
            seen.append(found[-1])
    assert list(dict.fromkeys(seen)) == list(whole)
