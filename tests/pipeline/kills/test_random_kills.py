"""SIGKILL at random moments of every stage, of any of its processes, and damage to checkpoints at
random places: what is run again ends with the bytes of a run that nothing happened to.

Moments, victims and damages follow from a seed. Counts are printed: `-s` shows them.
"""

import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock.config.loading.load import load
from penstock.core.cache.folder_digests import DIGESTS
from penstock.engine.checkpoint.folders import complete_checkpoints
from penstock.plan import RebuildOptions, execute_stage, plan
from penstock.reference import rank as reference_ranks
from penstock.rows.ref_logprobs import FILES
from penstock.train.metrics.jsonl import read_metrics
from tests.cli.command import Said, penstock_alone
from tests.damaging import flip_bit
from tests.engine import runs as engine_runs
from tests.pipeline.runs import sealed, write_run
from tests.pipeline.test_preference_chain import write_pairs, write_preferences
from tests.ranks import kill_on_ranks, on_ranks

pytestmark = [pytest.mark.exhaustive, pytest.mark.dist, pytest.mark.timeout(7200)]

SEED = int(os.environ.get("PENSTOCK_KILLS_SEED", "1"))
KILLS = int(os.environ.get("PENSTOCK_KILLS", "60"))
"""Of each stage."""
DAMAGES = int(os.environ.get("PENSTOCK_DAMAGES", "160"))
STEPS = 6


def files_below(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def kill_and_run_again(rng, name, world, fn, args, content, clear):
    """Kill `fn` KILLS times, in rounds of one to three kills and a run to the end, which has to
    leave the same content; how many kills hit a process at work."""

    def to_the_end():
        for said in on_ranks(world, fn, *args, timeout=600):
            # A command says how it ended; a run that did not raises.
            assert not isinstance(said, Said) or said.code == 0, said.err

    clear()
    to_the_end()
    clear()
    started = time.monotonic()
    to_the_end()
    lasts, whole = time.monotonic() - started, content()
    assert whole
    count: Counter[str] = Counter()
    while count["kills"] < KILLS:
        clear()
        for _ in range(rng.randint(1, 3)):
            victims = rng.choice([[rank] for rank in range(world)] + [list(range(world))])
            after = rng.uniform(0, lasts)
            count["kills"] += kill_on_ranks(world, fn, *args, victims=victims, after=after)
        to_the_end()
        assert content() == whole, (name, count)
        count["reruns to equal bytes"] += 1
    print(f"{name}: seed {SEED}, {dict(count)}, undisturbed {lasts:.1f} s")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A finished run whose stages are undone one at a time."""
    folder = tmp_path_factory.mktemp("kills")
    config = write_run(folder, push={"url": f"file://{folder}/target"})
    [said] = on_ranks(1, penstock_alone, "run", config, "--json", timeout=600)
    assert said.code == 0, said.err
    return folder, config


STAGES = {
    "pack": ("prepared",),
    "export": ("artifacts/export", "out/hf"),
    "push": ("artifacts/push", "target"),
}


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_stage_that_is_killed_at_random_ends_with_the_same_bytes(stage, chain):
    folder, config = chain

    def clear():
        for name in STAGES[stage]:
            path = folder / name
            if path.is_symlink():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)

    def content():
        target = folder / "target"
        return sealed(folder), files_below(target) if stage == "push" else {}

    rng = random.Random(f"{SEED} {stage}")
    args = (stage, config, "--json")
    kill_and_run_again(rng, stage, 1, penstock_alone, args, content, clear)


def bring_here(config, stage):
    """Every step of the run up to the stage, in this process, which is its only rank. Scores of a
    reference model are kept as soon as there are some."""
    reference_ranks.SAVE_SECONDS = 0.0
    planned = plan(load(config), (stage,), ranks="this_process")
    for step in planned.steps:
        execute_stage(step, planned.run, RebuildOptions(), lambda _: None)


def remove_all(*folders):
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)


def test_a_reference_model_that_is_killed_at_random_ends_with_the_same_scores(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", 400)
    config = write_preferences(tmp_path, data={"sample_packing_sequence_len": 128})
    at_once = set()

    def clear():
        at_once.add(len(list((tmp_path / "prepared/scores").glob(f"*/{FILES}"))))
        remove_all(tmp_path / "prepared/reference", tmp_path / "prepared/scores")

    rng = random.Random(f"{SEED} reference")
    args = (config, "reference")
    kill_and_run_again(rng, "reference", 1, bring_here, args, lambda: sealed(tmp_path), clear)
    assert max(at_once) > 2, "scores were kept all at once, so that no kill fell between"


def test_an_evaluation_that_is_killed_at_random_ends_with_the_same_figures(tmp_path):
    train = {"eval_only": True, "save_steps": 0}
    config = write_run(tmp_path, train=train, data={"val_set_size": 32})
    rng = random.Random(f"{SEED} evaluation")
    found = []

    def content():
        found.append(sealed(tmp_path))
        return found[-1]

    kill_and_run_again(
        *(rng, "evaluation", 1, bring_here, (config, "train"), content),
        lambda: remove_all(tmp_path / "out"),
    )
    assert found[0]["out/manifest.json"]["facts"]["eval_loss"] > 0


def evaluate(config, told):
    """Answers to held-out prompts, and what was said of them, in a file."""
    said = penstock_alone("eval", config, "--n", 3, "--json")
    told.write_text(said.out)
    return said


def test_answers_that_are_killed_at_random_are_the_same_when_they_are_asked_for_again(chain):
    folder, config = chain
    told = folder / "told.json"
    before = files_below(folder / "artifacts")
    rng = random.Random(f"{SEED} eval")
    kill_and_run_again(
        *(rng, "eval", 1, evaluate, (config, told), told.read_text),
        lambda: told.unlink(missing_ok=True),
    )
    assert files_below(folder / "artifacts") == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damages")
    engine_runs.write_rows(folder / "packed", 4 * STEPS)
    engine_runs.write_config(folder / "model")
    return folder


def job(folder, out, mode, **train):
    settings = {"data_parallel_mode": mode, "save_steps": 1, **train}
    run = engine_runs.run_config(folder / out, folder / "model", **settings)
    return engine_runs.job_of(run, folder / "packed")


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_training_whose_ranks_are_killed_at_random_ends_with_the_same_bytes(folder, behind):
    its = job(folder, f"killed {behind}", "fsdp2", save_async=behind)

    def clear():
        shutil.rmtree(its.output_dir, ignore_errors=True)
        its.output_dir.mkdir()

    def content():
        return files_below(its.output_dir / "checkpoints" / f"global_step_{STEPS}")

    rng = random.Random(f"{SEED} train {behind}")
    name = f"train on 2 ranks, save_async {behind}"
    kill_and_run_again(rng, name, 2, engine_runs.train_here, (its,), content, clear)


def damage(rng, folder):
    """One thing that is wrong with one file of a checkpoint; what it is."""
    file = folder / rng.choice(["__0_0.distcp", ".metadata", "state.json", DIGESTS, "COMPLETE"])
    way = rng.choice(["flip", "truncate", "delete", "replace"])
    if file.name == "COMPLETE":
        # It is empty, and there is nothing else to be wrong with it.
        way = "delete"
    if way == "replace" and file.name == ".metadata":
        way = "flip"
    if way == "flip":
        flip_bit(file, rng.randrange(file.stat().st_size))
    elif way == "truncate":
        file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])
    elif way == "delete":
        file.unlink()
    else:
        step = int(folder.name.removeprefix("global_step_"))
        shutil.copy(folder.with_name(f"global_step_{step - 1}") / file.name, file)
    return f"{way} {file.name}"


def damaged_and_resumed(its, whole):
    """Runs that meet one to three damaged checkpoints, and whether each ends as the whole one."""
    rng, count = random.Random(f"{SEED} damage"), Counter[str]()
    end = files_below(whole.output_dir / "checkpoints" / f"global_step_{STEPS}")
    while count["damages"] < DAMAGES:
        shutil.rmtree(its.output_dir, ignore_errors=True)
        shutil.copytree(whole.output_dir, its.output_dir)
        root = its.output_dir / "checkpoints"
        done = {}
        for folder in complete_checkpoints(root)[::-1][: rng.randint(1, 3)]:
            done[folder.name] = damage(rng, folder)
        engine_runs.train_here(its)
        assert files_below(root / f"global_step_{STEPS}") == end, done
        said = [
            r["warning"] for r in read_metrics(its.output_dir / "metrics.jsonl") if "warning" in r
        ]
        for name, what in done.items():
            [line] = [each for each in said if each.startswith(f"checkpoint {name} ")]
            count[f"{what}: {'skipped' if 'is skipped' in line else 'damaged'}"] += 1
        count["damages"] += len(done)
        count["reruns to equal bytes"] += 1
    return dict(sorted(count.items()))


def test_random_damage_to_checkpoints_is_found_and_the_run_ends_with_the_same_bytes(folder):
    whole, its = job(folder, "whole", "none"), job(folder, "damaged", "none")
    on_ranks(1, engine_runs.train_here, whole, timeout=600)
    [count] = on_ranks(1, damaged_and_resumed, its, whole, timeout=3600)
    print(f"damages: seed {SEED}, {count}")
    assert count["damages"] >= DAMAGES
