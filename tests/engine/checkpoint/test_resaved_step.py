"""A step that is saved again over an older checkpoint of its name, with a kill while one takes the
place of the other: a rerun resumes from the old one or from the new one."""

import os
import signal
from pathlib import Path

import pytest

from penstock.core import replace_folder
from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.checkpoint.resume import newest_whole_checkpoint
from penstock.engine.distributed.ranks import init_process_group
from tests.engine.checkpoint.test_checkpoint import contents, made, step
from tests.ranks import RankError, on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_after(call):
    def wrapped(*given):
        call(*given)
        kill()

    return wrapped


def kill_between_renames(root):
    rename = Path.rename

    def renamed(self, target):
        found = rename(self, target)
        if self.parent == root:
            kill()
        return found

    setattr(Path, "rename", renamed)  # noqa: B010


def saved_again(root, way):
    trained = made("copies", merge_qkv=True)
    for number in (1, 2):
        step(trained, number)
        if number == 2 and way == "exchanged":
            replace_folder.exchange = killed_after(replace_folder.exchange)
        if number == 2 and way == "renamed":
            replace_folder.exchange = lambda *_: False
            kill_between_renames(root)
        manager = CheckpointManager(root, trained, init_process_group(60))
        manager.save(7, {"step": 7, "key": "this run", "updates": number})
        manager.finish()


def resumed(root):
    """What a rerun loads; then it saves the step once more."""
    ranks, trained = init_process_group(60), made("copies", merge_qkv=True)
    manager = CheckpointManager(root, trained, ranks)
    found = newest_whole_checkpoint(root, ["this run"], ranks, pytest.fail)
    assert found is not None
    state = manager.load(found)
    read = {one.name: one.parameter.tolist() for one in trained.params}
    manager.save(7, state)
    manager.finish()
    return state["updates"], read


@pytest.mark.parametrize(("way", "updates"), [("exchanged", 2), ("renamed", 1)])
def test_a_kill_between_an_old_and_a_resaved_checkpoint_leaves_one_to_resume_from(
    tmp_path, way, updates
):
    with pytest.raises(RankError, match="died without a word"):
        on_ranks(4, saved_again, tmp_path, way)
    got, read = on_ranks(4, resumed, tmp_path)[0]
    assert got == updates
    want = on_ranks(4, after_updates, updates)[0]
    assert read == want
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_7"]
    assert contents(tmp_path / "global_step_7")


def after_updates(number):
    trained = made("copies", merge_qkv=True)
    for each in range(1, number + 1):
        step(trained, each)
    return {one.name: one.parameter.tolist() for one in trained.params}
