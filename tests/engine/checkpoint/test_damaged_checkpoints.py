"""Damaged checkpoints: found before anything is read from them, whichever byte it is, and passed
over for the newest whole one, from which the run ends with the bytes of one that was not."""

import pickle
import random
import resource
import shutil
import warnings

import pytest
import torch

from penstock.config.schema.base import Settings
from penstock.core.cache.folder_digests import DIGESTS
from penstock.core.cache.record import write_record
from penstock.core.cache.stage import ATTEMPT, Stage, identity, stage_key
from penstock.core.errors import ArtifactError, StageError
from penstock.core.files import regular_files
from penstock.core.remote.artifact_sync import RemoteArtifact
from penstock.engine.checkpoint.folders import (
    CheckpointNaming,
    checkpoint_faults,
    complete_checkpoints,
)
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.train.launch.upload_selection import files_to_download
from penstock.train.metrics.jsonl import read_metrics
from tests.damaging import flip_bit, remove_digests, truncate
from tests.engine import runs
from tests.ranks import on_ranks
from tests.stages.checkpoints import FOLDER, trained_artifact

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    runs.write_rows(folder / "packed", 4 * STEPS)
    runs.write_config(folder / "model")
    return folder


def job(folder, out, **train):
    settings = {"data_parallel_mode": "none", "save_steps": 1, **train}
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed")


def exchange(file):
    """The file of the checkpoint before, which is whole."""
    step = int(file.parent.name.removeprefix("global_step_"))
    shutil.copy(file.parent.with_name(f"global_step_{step - 1}") / file.name, file)


def delete(file):
    file.unlink()


FILES = ("__0_0.distcp", ".metadata", "state.json", DIGESTS)

DAMAGES = [(way, name) for way in (flip_bit, truncate, exchange, delete) for name in FILES]
# The table of contents of two checkpoints of a run is the same.
DAMAGES.remove((exchange, ".metadata"))


def contents(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for folder in complete_checkpoints(root)
        for path in regular_files(folder)
    }


def lines(its):
    records = read_metrics(its.output_dir / "metrics.jsonl")
    return [record["warning"] for record in records if "warning" in record]


def resumed(its, whole, damages):
    """For each of these damages to the newest checkpoint: what the run that meets it says, and
    whether it ends with the files of the one that is whole."""
    told = []
    for way, name in damages:
        shutil.rmtree(its.output_dir, ignore_errors=True)
        shutil.copytree(whole.output_dir, its.output_dir)
        root = its.output_dir / "checkpoints"
        way(root / f"global_step_{STEPS}" / name)
        runs.train_here(its)
        same = contents(root).items() >= contents(whole.output_dir / "checkpoints").items()
        aside = [path.name for path in (root / "damaged").glob("*")]
        told.append((lines(its), same, aside))
    return told


@pytest.mark.dist
@pytest.mark.parametrize("damages", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_whatever_is_wrong_with_the_newest_checkpoint_the_run_ends_as_if_it_were_not(
    folder, damages
):
    whole, its = job(folder, f"whole {damages}"), job(folder, f"its {damages}")
    on_ranks(1, runs.train_here, whole)
    damages = DAMAGES[::5] if damages == "some" else DAMAGES
    [found] = on_ranks(1, resumed, its, whole, damages)
    for (way, name), (said, same, aside) in zip(damages, found, strict=True):
        assert same, (way, name)
        [line] = [each for each in said if "is damaged" in each]
        # Digests of another checkpoint are whole, and the files are not those.
        named = "state.json" if (way, name) == (exchange, DIGESTS) else name
        assert line.startswith(f"checkpoint global_step_{STEPS} is damaged: {named} "), line
        assert f"it is now checkpoints/damaged/global_step_{STEPS}; " in line
        assert line.endswith(f"resuming from global_step_{STEPS - 1}")
        assert aside == [f"global_step_{STEPS}"]
    [(said, same, _)] = on_ranks(1, resumed, its, whole, [(delete, "COMPLETE")])[0]
    assert same
    assert f"checkpoint global_step_{STEPS} has no COMPLETE and is skipped" in said[0]


def refused(its, folders):
    """What a run says that is to start from each of these."""
    told = []
    for each in folders:
        shutil.rmtree(its.output_dir, ignore_errors=True)
        shutil.copytree(each, its.output_dir)
        with pytest.raises(ArtifactError) as caught:
            runs.train_here(its)
        told.append(str(caught.value))
    return told


@pytest.mark.dist
def test_a_run_of_which_no_checkpoint_is_whole_and_a_named_one_that_is_damaged_are_refused(folder):
    whole = job(folder, "whole too", save_total_limit=2)
    on_ranks(1, runs.train_here, whole)
    there, bad = whole.output_dir, folder / "bad"
    shutil.copytree(there, bad)
    for step in (STEPS, STEPS - 1):
        flip_bit(bad / "checkpoints" / f"global_step_{step}" / "__0_0.distcp")
    [first, again] = on_ranks(1, refused, job(folder, "none whole"), [bad, bad])[0]
    assert first == again
    assert f"no checkpoint in {folder / 'none whole' / 'checkpoints'} is valid" in first
    assert "global_step_3: __0_0.distcp differs from its digest (in bytes 0 to " in first
    assert "global_step_2: __0_0.distcp differs" in first
    assert "start from scratch with --fresh" in first
    (folder / "nothing").mkdir()
    named = bad / "checkpoints" / f"global_step_{STEPS}"
    for setting in ("load_checkpoint_path", "init_checkpoint_path"):
        its = job(folder, setting, max_steps=9, **{setting: str(named)})
        its = runs.job_of(its.config, folder / "packed", "b" * 64, initial=named)
        [[said]] = on_ranks(1, refused, its, [folder / "nothing"])
        assert f"{named} is damaged: __0_0.distcp differs from its digest" in said


def of_two(its, undigested):
    """Two ranks that resume: with one rank's file damaged, and from checkpoints without digests."""
    facts = runs.train_here(its)
    assert facts is not None
    root = its.output_dir / "checkpoints"
    before = contents(root)
    torch.distributed.barrier()  # the other rank may still be reading what is damaged next
    leads = torch.distributed.get_rank() == 0
    if leads:
        flip_bit(root / f"global_step_{STEPS}" / "__1_0.distcp")
    torch.distributed.barrier()
    runs.train_here(its)
    same = contents(root).items() >= before.items()
    torch.distributed.barrier()
    if leads:
        shutil.copytree(its.output_dir, undigested.output_dir, dirs_exist_ok=True)
        for each in complete_checkpoints(undigested.output_dir / "checkpoints"):
            remove_digests(each)
        root = undigested.output_dir / "checkpoints"
        truncate(root / f"global_step_{STEPS}" / "__1_0.distcp")
    torch.distributed.barrier()
    runs.train_here(undigested)
    return same


@pytest.mark.dist
@pytest.mark.slow
def test_all_ranks_agree_on_damage_that_one_of_them_finds_and_on_what_has_no_digests(folder):
    two = {"data_parallel_mode": "fsdp2"}
    its, undigested = job(folder, "two", **two), job(folder, "undigested", **two)
    assert on_ranks(2, of_two, its, undigested) == [True, True]
    assert any("global_step_3 is damaged: __1_0.distcp differs" in line for line in lines(its))
    said = lines(undigested)
    assert any(
        "global_step_3 is damaged: __1_0.distcp has " in line and "tensors up to byte" in line
        for line in said
    )
    assert any("global_step_2 was saved without digests" in line for line in said)


class TrainElsewhere(Stage):
    """What reconciling asks the train stage, of a run of one key."""

    name, version = "train", 1

    @property
    def inputs(self):
        return {}

    def run(self, out):
        raise AssertionError(f"nothing is to be built in {out}")

    def files_to_download(self, names, out):
        return files_to_download(names, out, CheckpointNaming())


@pytest.mark.dist
def test_a_mirror_gets_whole_checkpoints_in_place_of_damaged_ones_and_older_ones_if_there_are_none(
    folder, tmp_path, bucket
):
    its = job(folder, "mirrored")
    on_ranks(1, runs.train_here, its)
    stage, mirror = TrainElsewhere(Settings()), tmp_path / "mirror"
    write_record(its.output_dir / ATTEMPT, {**identity(stage), "key": stage_key(stage)})
    shutil.copytree(its.output_dir, mirror)
    depot = RemoteArtifact(f"{bucket}/mirrored", mirror)
    names = [path.relative_to(mirror).as_posix() for path in regular_files(mirror)]
    depot.send(names)
    newest_there = next(name for name in names if name.endswith(f"step_{STEPS}/__0_0.distcp"))

    def newest():
        depot.sync_mirror(stage)
        folders = complete_checkpoints(mirror / "checkpoints")
        return [each.name for each in folders if not checkpoint_faults(each)][-1]

    flip_bit(mirror / newest_there)
    assert newest() == f"global_step_{STEPS}"
    flip_bit(mirror / newest_there)
    depot.send([newest_there])
    shutil.rmtree(mirror)
    assert newest() == f"global_step_{STEPS - 1}"


def with_a_best(its, whole):
    """A run whose best checkpoint is not its newest, resumed with the best one damaged."""
    runs.train_here(whole)
    shutil.copytree(whole.output_dir, its.output_dir, dirs_exist_ok=True)
    root = its.output_dir / "checkpoints"
    best = (root / "best").read_text().strip()
    flip_bit(root / best / "__0_0.distcp")
    facts = runs.train_here(its)
    return best, facts, contents(root).items() >= contents(whole.output_dir / root.name).items()


@pytest.mark.dist
def test_a_checkpoint_whose_best_one_is_damaged_is_not_resumed_from(folder):
    runs.write_rows(folder / "packed", 3, seed=1, split="validation")
    train = {
        "lr": 3.0,
        "eval_steps": 1,
        "eval_micro_batch_size": 1,
        "save_best": {"metric": "eval_loss"},
        "data": {"val_set_size": 3},
    }
    whole, its = job(folder, "best", **train), job(folder, "its best", **train)
    [(best, facts, same)] = on_ranks(1, with_a_best, its, whole)
    assert best != f"global_step_{STEPS}"
    assert facts["checkpoint"] == f"checkpoints/{best}"
    assert same
    said = lines(its)
    assert any(f"global_step_{STEPS} is skipped: the best checkpoint" in each for each in said)
    assert any(f"checkpoint {best} is damaged: __0_0.distcp" in each for each in said)


def on_a_full_disk(its, most):
    """A run that may not write files of more than `most` bytes, which the kernel refuses in the
    middle of the first save as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(StageError) as caught:
            runs.train_here(its)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value), runs.train_here(its)


@pytest.mark.dist
def test_a_save_that_the_system_refuses_names_the_file_and_the_run_goes_on(folder):
    its = job(folder, "full")
    [(last, facts)] = on_ranks(1, on_a_full_disk, its, 60_000)
    assert "the checkpoint of step 3 could not be written: file too large (" in last
    assert "global_step_3.part/__0_0.distcp)" in last
    assert "inline_container" not in last
    assert facts["steps"] == STEPS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "count", [150, pytest.param(None, marks=pytest.mark.exhaustive, id="every bit")]
)
@pytest.mark.parametrize("name", [".metadata", "state.json"])
def test_no_flipped_bit_without_digests_raises_anything_but_an_artifact_error(
    tmp_path, name, count
):
    numbers = {"model.norm.weight": torch.randn(8), "head": torch.zeros(3, 2, dtype=torch.bfloat16)}
    there = trained_artifact(tmp_path, numbers).path / FOLDER
    good = (there / name).read_bytes()
    bits = range(8 * len(good))
    raised = 0
    for bit in bits if count is None else random.Random(1).sample(bits, min(count, len(bits))):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (there / name).write_bytes(bad)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader = CheckpointReader(there)
                reader.read(reader.shapes())
        except ArtifactError:
            raised += 1
    assert raised
    (there / name).write_bytes(pickle.dumps({}))
    with pytest.raises(ArtifactError, match=f"damaged: {name}"):
        CheckpointReader(there).shapes()
