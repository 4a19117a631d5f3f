"""Preferences from a file to a trained model: what is computed once, and what is learnt."""

import json
from pathlib import Path

import pytest

from penstock.config.loading.load import load
from penstock.config.schema.pipeline import StageName
from penstock.core.cache.store import StageResult
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan
from penstock.reference.stage import SCORES
from penstock.rows.ref_logprobs import FILES, read_scores
from penstock.train.launch.multi_node import is_worker_node
from penstock.train.metrics.jsonl import read_metrics
from tests.pipeline.runs import write_run
from tests.ranks import on_ranks
from tests.turns import one_day_in

LEARNS = {"objective": "preference", "num_train_epochs": 3, "eval_at_start": True}


def write_pairs(file: Path, count: int, first: int = 0) -> Path:
    """Sums with the right answer and a wordy one."""
    with file.open("a") as stream:
        for i in range(first, first + count):
            pair = {"prompt": f"{i} + {i} =", "chosen": f"{2 * i}", "rejected": f"Not {i}, I think"}
            stream.write(json.dumps(pair) + "\n")
    return file


def write_preferences(folder: Path, **sections) -> Path:
    pairs = folder / "pairs.jsonl"
    if not pairs.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_pairs(pairs, 24)
    named = {"datasets": [{"path": str(pairs), "type": "preference"}]}
    train = {"output_dir": str(folder / sections.pop("out", "out")), **LEARNS}
    laid = {
        **sections,
        "data": {**named, "shuffle_merged_datasets": False, **sections.get("data", {})},
        "train": {**train, "eval_at_end": True, **sections.get("train", {})},
    }
    return write_run(folder, **laid)


def brought(config: Path, wanted: StageName = "train") -> list[StageResult]:
    """Every step of the run, in this process, which is its only rank."""
    planned = plan(load(config), (wanted,), ranks="this_process")
    return [
        execute_stage(step, planned.run, RebuildOptions(), lambda _: None) for step in planned.steps
    ]


def bring(config: Path, wanted: StageName = "train") -> dict[str, StageResult]:
    """The outcomes by the stage's name."""
    [outcomes] = on_ranks(1, brought, config, wanted)
    return {outcome.stage: outcome for outcome in outcomes}


def scores(folder: Path) -> dict[str, list[Path]]:
    """What is known of answers, by model."""
    found: dict[str, list[Path]] = {}
    for file in (folder / "prepared" / SCORES).glob(f"*/{FILES}"):
        found.setdefault(file.parent.name, []).append(file)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder where a run has learnt from preferences, and what became of its stages."""
    folder = tmp_path_factory.mktemp("preferences")
    return folder, bring(write_preferences(folder))


@pytest.mark.dist
def test_a_tiny_model_comes_to_prefer_what_was_chosen(trained):
    folder, outcomes = trained
    assert [*outcomes] == ["prepare", "pack", "reference", "train"]
    before, after = (r for r in read_metrics(folder / "out" / "metrics.jsonl") if "eval_loss" in r)
    # Nothing has moved yet: the model is its own reference.
    assert before["eval_loss"] == pytest.approx(0.693147, rel=1e-5)
    assert before["eval_rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert after["eval_loss"] < before["eval_loss"] / 2
    assert after["eval_rewards/margins"] > 0.5
    assert after["eval_rewards/accuracies"] == 1.0


@pytest.mark.dist
def test_another_run_over_the_same_answers_uses_the_same_reference(trained):
    folder, outcomes = trained
    other = write_preferences(folder, out="other", preference={"beta": 0.5}, train={"lr": 0.001})
    again = bring(other)
    assert {name: again[name].status for name in again} == {
        "prepare": "cached",
        "pack": "cached",
        "reference": "cached",
        "train": "ran",
    }
    assert again["train"].key != outcomes["train"].key


@pytest.mark.dist
@pytest.mark.slow
def test_adapters_are_compared_with_the_model_beneath_them(trained):
    folder, outcomes = trained
    lora = {"enable_lora": True, "lora_rank": 4, "use_dora": True}
    again = bring(write_preferences(folder, out="adapted", lora=lora))
    assert again["reference"].key == outcomes["reference"].key
    before, after = (r for r in read_metrics(folder / "adapted/metrics.jsonl") if "eval_loss" in r)
    assert before["eval_rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert after["eval_rewards/margins"] > 0.01


@pytest.mark.dist
@pytest.mark.slow
def test_of_answers_that_are_packed_otherwise_nothing_is_computed_again(trained):
    folder, outcomes = trained
    known = scores(folder)
    packed = {"sample_packing_sequence_len": 128, "share_prompts": False}
    again = bring(write_preferences(folder, data=packed), "reference")
    assert again["reference"].status == "ran"
    assert scores(folder) == known
    assert again["reference"].facts == outcomes["reference"].facts


@pytest.mark.dist
@pytest.mark.slow
def test_of_reference_and_train_a_further_machine_runs_the_ranks_alone(tmp_path):
    launch = {"nnodes": 2, "node_rank": 1, "rdzv_endpoint": "127.0.0.1:29500", "nproc_per_node": 1}
    ddp = {"data_parallel_mode": "ddp"}
    planned = plan(load(write_preferences(tmp_path, launch=launch, train=ddp)), ("train",))
    assert [s.stage.name for s in planned.steps if is_worker_node(s)] == ["reference", "train"]


def test_a_damaged_score_that_runs_share_is_computed_again(trained):
    folder, outcomes = trained
    [[file]] = scores(folder).values()
    content = bytearray(file.read_bytes())
    last = read_scores(file)[1].tobytes()[-8:]
    content[content.index(last) + 6] ^= 1
    file.write_bytes(content)
    again = bring(write_preferences(folder, data={"sample_packing_sequence_len": 192}), "reference")
    assert again["reference"].status == "ran"
    assert again["reference"].facts == outcomes["reference"].facts
    [[mended]] = scores(folder).values()
    assert len(read_scores(mended)[0]) == outcomes["reference"].facts["samples"]


@pytest.mark.dist
@pytest.mark.slow
def test_of_answers_that_are_added_these_alone_are_computed(trained):
    folder, outcomes = trained
    [[first]] = scores(folder).values()
    write_pairs(folder / "pairs.jsonl", 3, first=24)
    again = bring(write_preferences(folder), "reference")
    [files] = scores(folder).values()
    [second] = set(files) - {first}
    assert again["reference"].facts["samples"] == outcomes["reference"].facts["samples"] + 3
    assert second.stat().st_size < first.stat().st_size


@pytest.mark.dist
@one_day_in(2, of=0)
def test_a_run_that_starts_from_adapters_is_compared_with_the_model_that_has_them(tmp_path):
    lora = {"enable_lora": True, "lora_rank": 4}
    first = bring(write_preferences(tmp_path, lora=lora))
    checkpoint = tmp_path / "out" / first["train"].facts["checkpoint"]
    start = {"init_checkpoint_path": str(checkpoint)}
    second = bring(write_preferences(tmp_path, out="second", lora=lora, train=start))
    assert second["reference"].key != first["reference"].key
    before = next(r for r in read_metrics(tmp_path / "second/metrics.jsonl") if "eval_loss" in r)
    assert before["eval_loss"] == pytest.approx(0.693147, rel=1e-5)
    assert before["eval_rewards/margins"] == pytest.approx(0, abs=1e-5)
