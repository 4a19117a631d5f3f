"""Files of an unfinished artifact: only what is as it was finished is taken over."""

import os
from pathlib import Path

import pytest
from pydantic import BaseModel

from penstock.core.cache.attempt_files import finished_write, take_over
from penstock.core.cache.stage import Stage
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import StageError

CONTENT = b"the rows of a shard" * 50


def flip(path: Path) -> None:
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGE = {
    "a flipped bit": flip,
    "a truncation": truncate,
    "an empty file": lambda path: path.write_bytes(b""),
    "a file of another": lambda path: path.write_bytes(b"x" * len(CONTENT)),
    "no note": lambda path: next(path.parent.glob(".rows*")).unlink(),
    "a damaged note": lambda path: flip(next(path.parent.glob(".rows*"))),
    "an empty note": lambda path: next(path.parent.glob(".rows*")).write_bytes(b""),
}


def write(path: Path) -> None:
    with finished_write(path) as part:
        part.write_bytes(CONTENT)


def test_a_finished_file_is_taken_over(tmp_path):
    write(tmp_path / "rows")
    assert take_over(tmp_path / "rows")
    assert not take_over(tmp_path / "others")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_as_it_was_finished_is_written_again(damage, tmp_path):
    rows = tmp_path / "rows"
    write(rows)
    DAMAGE[damage](rows)
    assert not take_over(rows)
    assert not rows.exists()


def leave(_: Path) -> None:
    """Change nothing."""


class NoSettings(BaseModel):
    """None."""


class Rows(Stage):
    """Writes two files; `between` is called in between."""

    name = "rows"
    version = 1
    settings = NoSettings()
    between = staticmethod(leave)

    @property
    def inputs(self):
        return {}

    def run(self, out):
        for name in ("rows-0", "rows-1"):
            if not take_over(out / name):
                write(out / name)
            type(self).between(out)
        return {}


def damage_note(rows: Path) -> None:
    flip(rows.with_name(f".{rows.name}.finished.part"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "/rows-0 was changed after it was written"),
        (truncate, "/rows-0 was changed after it was written"),
        (damage_note, r"/\.rows-0\.finished\.part (is damaged|cannot be read)"),
    ],
)
def test_damage_between_a_files_end_and_the_manifest_is_noticed_and_mended_by_a_rerun(
    damage, message, tmp_path, monkeypatch
):
    step = PlannedStage.in_root(Rows(NoSettings()), str(tmp_path))

    def damage_first(out):
        if not (out / "rows-1").exists():
            damage(out / "rows-0")

    monkeypatch.setattr(Rows, "between", staticmethod(damage_first))
    with pytest.raises(StageError, match=message):
        get_or_build(step)
    monkeypatch.setattr(Rows, "between", staticmethod(leave))
    result = get_or_build(step)
    assert (result.path / "rows-0").read_bytes() == CONTENT
    assert sorted(path.name for path in result.path.iterdir()) == [
        "manifest.json",
        "rows-0",
        "rows-1",
    ]
