"""Evaluations and answers on the way of a run, judged by transformers and by runs without them."""

import json
import math
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core.errors import StageError
from penstock.engine.generation.run import NotFiniteError
from penstock.rows.reader import PackedRows
from penstock.rows.tokenizer import byte_tokenizer
from penstock.train.eval import evaluator
from penstock.train.eval.evaluator import select_eval_rows
from penstock.train.eval.metrics import TokenMetrics, perplexity
from penstock.train.launch.stop_request import StopRequest
from penstock.train.metrics.jsonl import read_metrics
from tests.engine import runs
from tests.engine.loops import decoder_of, each, evaluated, loop_of
from tests.engine.step.held_out import (
    NEW_TOKENS,
    by_transformers,
    greedy,
    random_model,
    write_held_out,
)
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

# Sums of a few hundred fp32 losses of about 6, computed in another order.
RTOL = 2e-6
PROMPTS = ["One?", "Another one, longer!", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    model = random_model(folder / "model")
    runs.write_rows(folder / "packed", 10)
    write_held_out(folder / "packed" / "data" / "validation", model)
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def job(folder, out, **train):
    model = {"model_path": str(folder / "model"), **train.pop("model", {})}
    settings = {"max_steps": 5, "data_parallel_mode": "none", "lr": 1e-3, **train}
    data = {"val_set_size": 5, **settings.pop("data", {})}
    run = runs.run_config(folder / out, folder / "model", model=model, data=data, **settings)
    return runs.job_of(run, folder / "packed", tokenizer=str(folder / "tokenizer"))


def read(job, file="metrics.jsonl"):
    return list(read_metrics(job.output_dir / file))


def evaluations(job):
    """The records of evaluations without what is no number of theirs, by step, in order."""
    return [
        (r["step"], {n: v for n, v in r.items() if n.startswith("eval_")})
        for r in read(job)
        if "eval_loss" in r
    ]


def looked(job):
    """What an evaluation tells before any step, and what prompts are answered, on every rank."""
    loop = loop_of(job)
    held_out = job.packed_dir / "data" / "validation"
    told = evaluated(loop, PackedRows(held_out))
    assert loop.sampler is not None
    answers = loop.sampler.generate(lambda: False)
    return told, answers if loop.ranks.is_main_process else None


IN_LAYOUTS = {
    "shards": {"data_parallel_mode": "fsdp2", "eval_micro_batch_size": 3},
    "a divided vocabulary": {"tensor_parallel_size": 2},
    "a gathered vocabulary": {"tensor_parallel_size": 2, "tp_vocab_parallel_loss": False},
    "a divided stream": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "stages": {"pipeline_parallel_size": 2},
    "a ring": {"ringattn_parallel_size": 2},
    "ulysses": {"ulysses_parallel_size": 2},
}


@one_day_in(3, of=0)
def test_any_layout_tells_what_transformers_tells_and_answers_as_it_does(folder):
    asking = {"sample_prompts": PROMPTS, "sample_max_new_tokens": NEW_TOKENS}
    kept = {"data": {"pad_to_multiple_of": 16}, **asking}
    parallel = {
        name: job(folder, name, **{"data_parallel_mode": "fsdp2", **its}, **kept)
        for name, its in IN_LAYOUTS.items()
    }
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    wanted = by_transformers(model, folder / "packed/data/validation", range(7))
    assert 0.3 < wanted["eval_token_accuracy"] < 0.7
    tokenizer = byte_tokenizer()
    asked = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        for text in PROMPTS
    ]
    answers = [greedy(model, prompt, tokenizer.eos_token_id) for prompt in asked]
    found = {
        **on_ranks(1, each, looked, {"one": job(folder, "one", ce_mode="eager", **kept)})[0],
        **on_ranks(2, each, looked, parallel)[0],
    }
    for name, (told, given) in found.items():
        assert told == pytest.approx(wanted, rel=RTOL), name
        assert told["eval_token_accuracy"] == wanted["eval_token_accuracy"], name
        assert [one["prompt"] for one in given] == PROMPTS
        assert [one["tokens"] for one in given] == [len(answer) for answer in answers], name
        for one, answer in zip(given, answers, strict=True):
            said = [token for token in answer if token != tokenizer.eos_token_id]
            assert one["answer"] == tokenizer.decode(said), name


OFTEN = {
    "at the end": ({}, [5]),
    "every two steps": ({"eval_steps": 2}, [2, 4, 5]),
    "not at the end": ({"eval_steps": 2, "eval_at_end": False}, [2, 4]),
    "every epoch": ({"eval_epochs": 1.0}, [2, 4, 5]),
    "twice an epoch": ({"eval_epochs": 0.5}, [1, 2, 3, 4, 5]),
    "at the start": ({"eval_at_start": True}, [0, 5]),
    "tried at the start": ({"eval_sanity_batches": 2}, [5]),
    "of nothing": ({"eval_steps": 1, "eval_max_batches": 0}, []),
    "of a batch": ({"eval_max_batches": 1}, [5]),
    "of two small batches": ({"eval_max_batches": 2, "eval_rows_per_batch": 2}, [5]),
    "of half": ({"eval_max_batches": 0.5}, [5]),
    "alone": ({"eval_only": True}, [0]),
}


@one_day_in(3, of=2)
def test_a_run_evaluates_as_often_and_on_as_much_as_is_written(folder):
    # Ten rows, four to a step: two steps make an epoch.
    jobs = {
        what: job(folder, what, log_format="structured", **its) for what, (its, _) in OFTEN.items()
    }
    [facts] = on_ranks(1, each, runs.train_here, jobs)
    for what, (_, steps) in OFTEN.items():
        assert [step for step, _ in evaluations(jobs[what])] == steps, what
    of_all = evaluations(jobs["at the end"])[0][1]
    told = {name: value for name, value in facts["at the end"].items() if name.startswith("eval_")}
    assert told == of_all == evaluations(jobs["every two steps"])[-1][1]
    assert evaluations(jobs["of half"])[0][1] == evaluations(jobs["of a batch"])[0][1] != of_all
    small = evaluations(jobs["of two small batches"])[0][1]
    assert small == evaluations(jobs["of a batch"])[0][1]
    assert facts["alone"]["steps"] == 0
    assert facts["alone"]["final_loss"] is None
    assert not (jobs["alone"].output_dir / "checkpoints").exists()
    assert evaluations(jobs["alone"])[0] == evaluations(jobs["at the start"])[0]


def tried(job):
    """The rows that were read to be looked at, by step; and how the run ends, and where, if the
    model makes no numbers."""
    loop, seen, read_rows = loop_of(job), [], evaluator.read

    def noted(rows, groups, reading):
        seen.extend((loop.at.step, number) for group in groups for number in group)
        return read_rows(rows, groups, reading)

    evaluator.read = noted
    try:
        loop.run()
    finally:
        evaluator.read = read_rows
    shutil.rmtree(job.output_dir)
    broken = loop_of(job)
    norm = decoder_of(broken).model.norm
    assert norm is not None
    assert norm.weight is not None
    norm.weight.data.fill_(math.nan)
    with pytest.raises(StageError) as error:
        broken.run()
    return loop.built.pairs_per_token, seen, str(error.value), broken.at.step


def test_evaluating_is_tried_on_the_dearest_rows_and_ends_a_run_that_cannot(folder):
    made = job(folder, "tried", eval_sanity_batches=1, eval_at_end=False, max_steps=1)
    [(pairs_per_token, seen, error, step)] = on_ranks(1, tried, made)
    rows = PackedRows(made.packed_dir / "data" / "validation")
    costs = pairs_per_token * rows.lengths() + rows.squares()
    assert sorted(seen) == [(0, int(number)) for number in sorted(np.argsort(-costs)[:4])]
    assert "before the first step the loss of 1 batch(es) of evaluation rows is nan" in error
    assert "train.eval_sanity_batches: 0" in error
    assert step == 0
    assert not evaluations(made)


def passed(job):
    """The rows of each pass of an evaluation."""
    loop, seen, read_rows = loop_of(job), [], evaluator.read

    def noted(rows, groups, reading):
        seen.append([len(group) for group in groups])
        return read_rows(rows, groups, reading)

    assert loop.held_out is not None
    evaluator.read = noted
    loop.held_out.evaluate(lambda: False)
    evaluator.read = read_rows
    return seen


def test_rows_are_evaluated_so_many_at_once_as_is_written(folder):
    settings = {"as in training": {"micro_batch_size": 2}, "three": {"eval_micro_batch_size": 3}}
    jobs = {name: job(folder, f"at once {name}", **its) for name, its in settings.items()}
    [found] = on_ranks(1, each, passed, jobs)
    assert found == {"as in training": [[2], [2], [2], [1]], "three": [[3], [3], [1]]}


def bytes_and_losses(job):
    facts = runs.train_here(job)
    assert facts is not None
    last = job.output_dir / facts["checkpoint"]
    files = {path.name: path.read_bytes() for path in sorted(last.iterdir())}
    return files, runs.losses(job.output_dir)


@one_day_in(2, of=0)
def test_looking_at_a_model_changes_nothing_of_it(folder):
    often = {"eval_steps": 1, "eval_at_start": True, "eval_micro_batch_size": 2}
    asking = {"sample_prompts": PROMPTS, "sample_steps": 2, "sample_max_new_tokens": 2}
    jobs = {
        name: job(folder, f"changes {name}", dropout={"hidden": 0.2}, **its)
        for name, its in {"nothing": {}, "much": {**often, **asking}}.items()
    }
    [found] = on_ranks(1, each, bytes_and_losses, jobs)
    plain, looked_at = found["nothing"], found["much"]
    state = {name: json.loads(files.pop("state.json")) for name, (files, _) in found.items()}
    for files, _ in found.values():
        files.pop("digests.json")  # holds that of state.json
    assert state["much"].pop("owes") == ["evaluation", "samples"]
    assert state["nothing"].pop("owes") == ["evaluation"]
    assert state["much"] == state["nothing"]
    assert looked_at == plain
    samples = read(jobs["much"], "samples.jsonl")
    assert [record["step"] for record in samples] == [2, 4, 5]
    assert [one["prompt"] for one in samples[0]["samples"]] == PROMPTS


class StopsWhileLooking(StopRequest):
    """Asks to stop in the middle of what is due after a step."""

    def __init__(self, step, within):
        super().__init__()
        self.step, self.within, self.asked = step, within, 0

    def watch(self, loop):
        self.loop = loop

    def __bool__(self):
        if (
            self.loop.at.step == self.step
            and self.loop.ranks.heartbeat._status.phase == self.within
        ):
            self.asked += 1
        return self.asked > 1


def interrupted(job, step, within):
    """A start of the run that is asked to stop there; what it returns."""
    loop = loop_of(job)
    loop.stop = StopsWhileLooking(step, within)
    loop.stop.watch(loop)
    return loop.run(), loop.at.step


class Killed(BaseException):
    pass


def killed(job, step):
    """A start of the run that ends for good after the evaluation of that step was told."""
    loop = loop_of(job)
    tell = loop._log

    def then_end(record):
        tell(record)
        if record["step"] == step and "eval_loss" in record:
            raise Killed

    loop._log = then_end
    try:
        loop.run()
    except Killed:
        return loop.at.step
    raise AssertionError("it went on")


def all_starts(jobs):
    whole = bytes_and_losses(jobs["whole"])
    told = [
        interrupted(jobs["stopped"], 4, "evaluating"),
        interrupted(jobs["stopped"], 5, "generating"),
    ]
    ends = killed(jobs["stopped"], 6), killed(jobs["killed"], 4)
    return whole, told, ends, bytes_and_losses(jobs["stopped"]), bytes_and_losses(jobs["killed"])


@one_day_in(3, of=2)
def test_what_breaks_off_while_looking_is_made_up_for_once(folder):
    often = {
        "max_steps": 6,
        "eval_steps": 2,
        "save_steps": 2,
        "sample_prompts": PROMPTS,
        "sample_steps": 5,
        "sample_max_new_tokens": 3,
        "save_best": {"metric": "eval_loss"},
        "early_stopping": {"patience": 9},
    }
    jobs = {
        name: job(folder, f"looking {name}", **often) for name in ("whole", "stopped", "killed")
    }
    [(whole, told, ends, *others)] = on_ranks(1, all_starts, jobs)
    assert told == [(None, 4), (None, 5)]
    assert ends == (6, 4)
    for other in others:
        assert other == whole
    for name in ("stopped", "killed"):
        for file in ("metrics.jsonl", "samples.jsonl"):
            records = [
                {n: v for n, v in record.items() if n in ("step", "loss", "eval_loss", "samples")}
                for record in read(jobs[name], file)
            ]
            of_whole = [
                {n: v for n, v in record.items() if n in ("step", "loss", "eval_loss", "samples")}
                for record in read(jobs["whole"], file)
            ]
            assert records == of_whole, (name, file)


def test_only_evaluating_needs_something_held_out(folder, tmp_path):
    shutil.copytree(folder / "packed" / "data" / "train", tmp_path / "data" / "train")
    made = job(folder, "nothing held out", eval_only=True)
    made = runs.job_of(made.config, tmp_path)
    with pytest.raises(AssertionError, match=r"(?s)no evaluation data.*data\.test_datasets"):
        on_ranks(1, runs.train_here, made)
    unknown = job(folder, "unknown", eval_steps=1, save_best={"metric": "eval_loss/none"})
    with pytest.raises(AssertionError, match=r"(?s)is eval_loss/none.*eval_loss/poems"):
        on_ranks(1, runs.train_here, unknown)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_told_of_before_the_first_step(folder):
    made = job(folder, "no room", sample_prompts=["x", 600 * "y"])
    with pytest.raises(AssertionError, match=r"train\.sample_prompts\.1 has 6\d\d tokens"):
        on_ranks(1, runs.train_here, made)


def asked_when_diverged(job):
    loop = loop_of(job)
    decoder_of(loop).get_parameter("model.norm.weight").data.fill_(math.nan)
    assert loop.sampler is not None
    with pytest.raises(NotFiniteError):
        loop.sampler.generate(lambda: False)


def test_a_model_that_has_diverged_gives_no_answers(folder):
    on_ranks(1, asked_when_diverged, job(folder, "diverged", sample_prompts=["x"]))


@pytest.mark.parametrize(
    ("rows", "limit", "chosen"),
    [
        (7, None, [0, 1, 2, 3, 4, 5, 6]),
        (7, 1, [0, 2, 4]),
        (7, 1.0, [0, 1, 2, 3, 4, 5, 6]),
        (10, 0.3, [0, 3, 6]),
        (2, 5, [0, 1]),
        (7, 0, []),
    ],
)
def test_a_limit_takes_the_same_rows_from_everywhere(rows, limit, chosen):
    assert select_eval_rows(rows, limit, 3).tolist() == chosen


def test_every_token_weighs_alike_in_an_evaluation_whichever_data_set_it_is_of(folder):
    rows = PackedRows(folder / "packed" / "data" / "validation")
    # Summed loss, loss weights, tokens and those foretold of each data set, in two updates.
    parts = [
        [[5.0, 3, 2, 1], [100.0, 60, 60, 12]],
        [[3.0, 1, 2, 0], [200.0, 136, 136, 87]],
    ]
    counts = iter(torch.tensor(parts, dtype=torch.float64))
    evaluates = SimpleNamespace(counts=lambda *_: next(counts))
    built: Any = SimpleNamespace(evaluator=evaluates)
    ranks: Any = SimpleNamespace(device="cpu", all_reduce_sum=lambda counts: counts)
    metrics = TokenMetrics(rows, built, ranks)
    for _ in parts:
        metrics.update([])
    assert metrics.compute() == {
        "eval_loss": 308 / 200,
        "eval_perplexity": math.exp(308 / 200),
        "eval_token_accuracy": 100 / 200,
        "eval_loss/arithmetic": 8 / 4,
        "eval_loss/poems": 300 / 196,
    }


def test_the_perplexity_of_a_hopeless_model_is_infinite():
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e4) == math.inf
