"""`penstock prepare CONFIG --shard i/n`: several machines tokenize a share each, and one seals."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cli.command import Said, penstock, penstock_alone
from tests.pipeline.runs import write_chats, write_run
from tests.ranks import on_ranks
from tests.stages.prepared import contents

FILES = 5


def several_files(folder: Path) -> Path:
    """A run that prepares from several files, all different."""
    folder.mkdir(exist_ok=True)
    files = [write_chats(folder / f"{n}.jsonl", 12, salt=f" ({n})") for n in range(FILES)]
    return write_run(
        folder,
        data={
            "datasets": [{"path": str(file), "type": "chat"} for file in files],
            "dataset_prepared_path": str(folder / "prepared"),
        },
    )


def sealed(folder: Path) -> dict[str, bytes]:
    """The files of the one prepared artifact, but the manifest, which tells when and where."""
    [manifest] = folder.glob("*/prepare/*/manifest.json")
    found = contents(manifest.parent)
    del found["manifest.json"]
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_machines_at_once_do_every_slice_once_and_the_last_command_only_seals(tmp_path):
    config = several_files(tmp_path / "run")
    said = on_ranks(3, prepares_its_share, config)
    stages = [stage for one in said for stage in one.last["stages"]]
    assert [stage["facts"]["share"] for stage in stages] == ["1/3", "2/3", "3/3"]
    assert sum(stage["facts"]["slices"] for stage in stages) == FILES
    assert sum(stage["facts"]["done"] for stage in stages) == FILES
    assert {(stage["stage"], stage["status"]) for stage in stages} == {("prepare", "ran")}
    assert not list(tmp_path.glob("run/prepared/prepare/*/manifest.json"))

    slices = tmp_path / "run" / "prepared" / "slices"
    made = {file.name: file.stat().st_ino for file in slices.glob("*.arrow")}
    last = penstock("prepare", config, "--json").last
    assert (last["stages"][0]["status"], last["stages"][0]["key"]) == ("ran", stages[0]["key"])
    assert {file.name: file.stat().st_ino for file in slices.glob("*.arrow")} == made

    alone = tmp_path / "alone"
    penstock("prepare", config, "--data.dataset_prepared_path", alone / "prepared")
    assert sealed(tmp_path / "run") == sealed(alone)


def prepares_its_share(config: Path) -> Said:
    share = f"{dist.get_rank() + 1}/{dist.get_world_size()}"
    return penstock_alone("prepare", config, "--shard", share, "--json")


def test_a_share_that_is_done_is_cached_and_so_is_one_of_sealed_data(tmp_path):
    config = several_files(tmp_path / "run")
    shares = [penstock("prepare", config, "--shard", "1/1", "--json").last for _ in range(2)]
    assert [share["stages"][0]["status"] for share in shares] == ["ran", "cached"]
    facts = {"share": "1/1", "slices": FILES, "done": 0}
    assert shares[1]["stages"][0]["facts"] == facts
    penstock("prepare", config)
    after = penstock("prepare", config, "--shard", "1/1", "--json").last["stages"][0]
    assert (after["status"], after["facts"]["done"]) == ("cached", 0)
    assert after["facts"]["rows"] == {"train": 12 * FILES - 4, "validation": 4}


@pytest.mark.parametrize("share", ["0/4", "5/4", "1/0", "4", "-1/4", "1/4/2", "one/two", ""])
def test_a_share_that_there_is_none_of_is_refused(share, tmp_path):
    said = penstock("prepare", several_files(tmp_path), f"--shard={share}")
    assert said.code == 2
    assert "Write --shard" in said.err
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize("word", ["--force=prepare", "--from=prepare"])
def test_a_share_builds_nothing_again(word, tmp_path):
    said = penstock("prepare", several_files(tmp_path), "--shard", "1/2", word)
    assert said.code == 2
    assert "neither --force nor --from" in said.err


def test_there_is_no_share_of_data_that_is_taken_as_it_is(tmp_path):
    config = several_files(tmp_path)
    penstock("prepare", config)
    said = penstock("prepare", config, "--shard", "1/2", "--data.skip_prepare_dataset", "true")
    assert said.code == 2
    assert "data.skip_prepare_dataset" in said.err
