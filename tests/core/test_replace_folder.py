"""A folder that takes the place of another one: a whole one is there after a kill at any moment."""

import os
import signal

import pytest

from penstock.core import replace_folder as module
from penstock.core.files import remove
from penstock.core.replace_folder import exchange, replace_folder, restore_replaced

SUFFIX = ".replaced.part"
CALLS = ("exchange", "remove", "fsync")


def make(folder, content):
    folder.mkdir()
    (folder / "content").write_text(content)


def replace(root):
    if old := replace_folder(root / "a.part", root / "a", root / f"a{SUFFIX}"):
        remove(old)


def killed_before(number, root):
    """Whether a process that replaces `a` is killed before its so-manieth call that changes
    files."""
    child = os.fork()
    if child == 0:
        left = iter(range(number))

        def counted(call):
            def wrapped(*given):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*given)

            return wrapped

        for name in CALLS:
            setattr(module, name, counted(getattr(module, name)))
        setattr(module.Path, "rename", counted(module.Path.rename))  # noqa: B010
        try:
            replace(root)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("way", ["exchanged", "renamed"])
def test_after_a_kill_at_any_moment_the_old_or_the_new_folder_is_there_whole(
    tmp_path, monkeypatch, way
):
    if way == "renamed":
        monkeypatch.setattr(module, "exchange", lambda *_: False)
    found = []
    for number in range(10):
        root = tmp_path / str(number)
        root.mkdir()
        make(root / "a", "old")
        make(root / "a.part", "new")
        was_killed = killed_before(number, root)
        if way == "exchanged":
            assert (root / "a/content").is_file()  # also to those who read at that moment
        restore_replaced(root, SUFFIX)
        found.append((root / "a/content").read_text())
        # The rerun writes its own again.
        remove(root / "a.part")
        make(root / "a.part", "rerun")
        replace(root)
        assert (root / "a/content").read_text() == "rerun"
        assert [path.name for path in root.iterdir()] == ["a"]
        if not was_killed:
            break
    else:
        pytest.fail("no replacement came to its end")
    assert len(found) > (3 if way == "renamed" else 2)
    assert found == sorted(found, reverse=True)
    assert {found[0], found[-1]} == {"old", "new"}


def test_a_folder_that_replaces_nothing_takes_its_name(tmp_path):
    make(tmp_path / "a.part", "new")
    replace(tmp_path)
    assert (tmp_path / "a/content").read_text() == "new"


def test_a_folder_whose_replacement_is_in_place_is_not_put_back(tmp_path):
    make(tmp_path / "a", "new")
    make(tmp_path / f"a{SUFFIX}", "old")
    restore_replaced(tmp_path, SUFFIX)
    assert (tmp_path / "a/content").read_text() == "new"


def test_names_are_exchanged_where_the_system_can_and_other_errors_are_raised(tmp_path):
    make(tmp_path / "a", "a")
    make(tmp_path / "b", "b")
    if exchange(tmp_path / "a", tmp_path / "b"):
        assert (tmp_path / "a/content").read_text() == "b"
        assert (tmp_path / "b/content").read_text() == "a"
        with pytest.raises(FileNotFoundError):
            exchange(tmp_path / "a", tmp_path / "none")
