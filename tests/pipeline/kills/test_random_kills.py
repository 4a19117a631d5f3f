"""SIGKILL at random moments of every stage, of any of its processes, and damage at random places to
what it leaves: what is run again ends with the bytes of a run that nothing happened to.

Moments, victims and damages follow from a seed. Counts are printed: `-s` shows them.
"""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from penstock.config.loading.load import load
from penstock.core.cache.folder_digests import DIGESTS
from penstock.core.cache.manifest import MANIFEST
from penstock.core.files import remove
from penstock.core.replace_folder import DELETED
from penstock.engine.checkpoint.folders import complete_checkpoints
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan
from penstock.reference import rank as reference_ranks
from penstock.rows.ref_logprobs import FILES
from penstock.train.metrics.jsonl import read_metrics
from tests.cli.command import penstock_alone
from tests.damaging import flip_bit
from tests.engine import runs as engine_runs
from tests.pipeline.kills.killing import Scene, soak, unfinished
from tests.pipeline.media import test_encode as images
from tests.pipeline.runs import sealed, write_chats, write_run
from tests.pipeline.test_preference_chain import write_pairs, write_preferences
from tests.pipeline.test_recurring import Story, recurring_run
from tests.ranks import on_ranks
from tests.stages.compose.test_composing import SCRATCH

pytestmark = [pytest.mark.dist, pytest.mark.timeout(7200)]

SEED = int(os.environ.get("PENSTOCK_KILLS_SEED", "1"))
KILLS = int(os.environ.get("PENSTOCK_KILLS", "30"))
"""Of each scene."""
DAMAGES = int(os.environ.get("PENSTOCK_DAMAGES", "160"))
STEPS = 6


def check(scene: Scene) -> None:
    assert soak(scene, KILLS, SEED)["kills"] >= KILLS


def files_below(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


def remove_all(*folders: Path) -> None:
    for path in folders:
        remove(path)


def bring_here(config, stage):
    """Every step of the run up to the stage, in this process, which is its only rank. Scores of a
    reference model are kept as soon as there are some."""
    reference_ranks.SAVE_SECONDS = 0.0
    planned = plan(load(config), (stage,), ranks="this_process")
    for step in planned.steps:
        execute_stage(step, planned.run, RebuildOptions(), lambda _: None)


def run_here(config):
    bring_here(config, "push")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A finished run whose stages are undone one at a time."""
    folder = tmp_path_factory.mktemp("kills")
    datasets = []
    for number in range(3):
        path = write_chats(folder / f"chats-{number}.jsonl", 30, salt=f" ({number})")
        datasets.append({"path": str(path), "type": "chat"})
    data = {"datasets": datasets, "num_dataset_shards_to_save": 3}
    train = {"max_steps": STEPS, "save_steps": 1}
    push = {"url": f"file://{folder}/target"}
    config = write_run(folder, data=data, train=train, push=push)
    on_ranks(1, run_here, config, timeout=600)
    return folder, config


STAGES = {
    "prepare": ["prepared"],
    "pack": ["prepared/pack"],
    "train": ["out"],
    "export": ["artifacts/export", "out/hf"],
    "push": ["artifacts/push", "target"],
}


def scene_of(stage: str, folder: Path, config: Path) -> Scene:
    roots = [folder / name for name in STAGES[stage]]

    def content():
        return sealed(folder), files_below(folder / "target") if stage == "push" else {}

    def left():
        # A push that ended sends a file again that is damaged later, and says that it sent one.
        is_pushed = stage == "push" and any((folder / "artifacts/push").rglob(MANIFEST))
        return [] if is_pushed else unfinished(*roots)

    return Scene(
        f"{stage} on 1 rank" if stage == "train" else stage,
        folder,
        bring_here,
        (config, stage),
        lambda: remove_all(*roots),
        content,
        left,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_ends_with_the_same_bytes(stage, chain):
    check(scene_of(stage, *chain))


@pytest.mark.slow
def test_a_few_kills_of_prepare_end_with_the_same_bytes(tmp_path):
    scene = scene_of("prepare", tmp_path, write_run(tmp_path))
    assert soak(scene, 6, SEED)["kills"] >= 6


@pytest.mark.exhaustive
def test_a_lengthened_run_ends_with_the_same_bytes(chain, tmp_path):
    folder, config = tmp_path / "longer", tmp_path / "longer/run.yaml"
    shutil.copytree(chain[0], folder, symlinks=True)
    words = chain[1].read_text().replace(str(chain[0]), str(folder))
    config.write_text(words)
    remove(folder / "out/hf")
    on_ranks(1, bring_here, config, "train", timeout=600)
    shutil.copytree(folder / "out", folder / "finished", symlinks=True)
    config.write_text(words.replace(f"max_steps: {STEPS}", f"max_steps: {STEPS + 4}"))

    def clear():
        remove(folder / "out")
        shutil.copytree(folder / "finished", folder / "out", symlinks=True)

    check(
        Scene(
            *("lengthen", folder, bring_here, (config, "train"), clear),
            lambda: sealed(folder),
            lambda: unfinished(folder / "out"),
        )
    )


@pytest.mark.exhaustive
def test_a_reference_model_ends_with_the_same_scores(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", 400)
    config = write_preferences(tmp_path, data={"sample_packing_sequence_len": 128})
    roots = [tmp_path / "prepared/reference", tmp_path / "prepared/scores"]
    at_once = set()

    def clear():
        at_once.add(len(list(roots[1].glob(f"*/{FILES}"))))
        remove_all(*roots)

    check(
        Scene(
            *("reference", tmp_path, bring_here, (config, "reference"), clear),
            lambda: sealed(tmp_path),
            lambda: unfinished(*roots),
        )
    )
    assert max(at_once) > 2, "scores were kept all at once, so that no kill fell between"


@pytest.mark.exhaustive
def test_features_of_images_end_with_the_same_bytes(tmp_path):
    config = write_run(tmp_path, **images.sections_of(tmp_path, conversations=images.MANY))
    on_ranks(1, bring_here, config, "prepare", timeout=600)
    roots = [tmp_path / "prepared" / name for name in ("encode", "features")]
    check(
        Scene(
            *("encode", tmp_path, bring_here, (config, "encode"), lambda: remove_all(*roots)),
            lambda: sealed(tmp_path),
            lambda: unfinished(*roots),
        )
    )


def compose_here(config):
    plan(load(config))


@pytest.mark.exhaustive
def test_a_composed_model_ends_with_the_same_bytes(tmp_path):
    config = write_run(tmp_path, model=SCRATCH)
    root = tmp_path / "artifacts/compose"
    check(
        Scene(
            *("compose", tmp_path, compose_here, (config,), lambda: remove(root)),
            lambda: files_below(next(root.glob("[0-9a-f]*/hf"))),
            lambda: unfinished(root),
        )
    )


@pytest.mark.exhaustive
def test_an_evaluation_ends_with_the_same_figures(tmp_path):
    train = {"eval_only": True, "save_steps": 0}
    config = write_run(tmp_path, train=train, data={"val_set_size": 32})
    out = tmp_path / "out"
    check(
        Scene(
            *("evaluation", tmp_path, bring_here, (config, "train"), lambda: remove(out)),
            lambda: sealed(tmp_path),
            lambda: unfinished(out),
        )
    )
    assert sealed(tmp_path)["out/manifest.json"]["facts"]["eval_loss"] > 0


def evaluate(config, told):
    """Answers to held-out prompts, and what was said of them, in a file."""
    said = penstock_alone("eval", config, "--n", 3, "--json")
    told.write_text(said.out)
    return said


@pytest.mark.exhaustive
def test_answers_are_the_same_when_they_are_asked_for_again(chain):
    folder, config = chain
    told = folder / "told.json"
    before = files_below(folder / "artifacts")
    check(
        Scene(
            *("eval", folder, evaluate, (config, told)),
            lambda: told.unlink(missing_ok=True),
            lambda: (told.read_text(), files_below(folder / "artifacts") == before),
            list,
        )
    )


@pytest.mark.exhaustive
def test_pruning_leaves_the_same_results(chain, tmp_path):
    folder, template = tmp_path / "pruned", tmp_path / "template"
    shutil.copytree(chain[0], template, symlinks=True)
    for number in range(3):
        old = template / f"prepared/pack/{number:016x}"
        shutil.copytree(next((template / "prepared/pack").glob("[0-9a-f]*")), old)

    def clear():
        remove(folder)
        shutil.copytree(template, folder, symlinks=True)

    words = ("artifacts", "prune", "--root", folder, "--keep-last", 1, "--unreferenced")
    check(
        Scene(
            *("prune", folder, penstock_alone, words, clear),
            lambda: files_below(folder),
            lambda: [
                path
                for path in unfinished(folder / "prepared/pack", folder / "artifacts")
                if DELETED in str(path)
            ],
        )
    )


def tick_here(config):
    return Story(config).tick()["verdict"]


@pytest.mark.exhaustive
def test_a_recurring_run_releases_the_same(tmp_path):
    config = recurring_run(tmp_path)
    made = [tmp_path / name for name in ("prepared", "artifacts", "out")]
    releases = tmp_path / "artifacts/releases"

    def content():
        files = files_below(releases).items()
        weights = {name: data for name, data in files if name.endswith(".safetensors")}
        return sealed(tmp_path), weights, (releases / "bot/latest").readlink()

    check(
        Scene(
            *("recur", tmp_path, tick_here, (config,), lambda: remove_all(*made)),
            content,
            lambda: unfinished(*made),
        )
    )


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_training_on_two_ranks_ends_with_the_same_bytes(folder, behind):
    its = job(folder, f"killed {behind}", "fsdp2", save_async=behind)

    def clear():
        remove(its.output_dir)
        its.output_dir.mkdir()

    check(
        Scene(
            f"train on 2 ranks, save_async {behind}",
            its.output_dir,
            engine_runs.train_here,
            (its,),
            clear,
            lambda: files_below(its.output_dir / "checkpoints" / f"global_step_{STEPS}"),
            lambda: unfinished(its.output_dir),
            world=2,
        )
    )


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
        remove(its.output_dir)
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


@pytest.mark.exhaustive
def test_random_damage_to_checkpoints_is_found_and_the_run_ends_with_the_same_bytes(folder):
    whole, its = job(folder, "whole", "none"), job(folder, "damaged", "none")
    on_ranks(1, engine_runs.train_here, whole, timeout=600)
    [count] = on_ranks(1, damaged_and_resumed, its, whole, timeout=3600)
    print(f"damages: seed {SEED}, {count}")
    assert count["damages"] >= DAMAGES
