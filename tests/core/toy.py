"""A stage of a few bytes: one file per letter, skipping those an earlier attempt has finished."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.config.schema.base import Settings
from penstock.core.cache.stage import Artifact, Facts, Input, Source, Stage, short, stage_key
from penstock.core.cache.store import PlannedStage
from penstock.core.files import atomic_write


class LettersSettings(Settings):
    letters: str = "abcd"
    doubled: bool = False


FOUR = LettersSettings()
ALPHABET = Source({"kind": "builtin", "name": "alphabet"})


@dataclass(frozen=True)
class Letters(Stage):
    name: ClassVar[str] = "letters"
    version: ClassVar[int] = 1
    neutral: ClassVar[Mapping[str, bool]] = {"doubled": False}

    settings: LettersSettings = FOUR
    read: Artifact | Source = ALPHABET
    journal: Path | None = None
    """How: where each letter that was really written is noted."""
    before: Callable[[str, Path], None] = lambda _letter, _out: None
    """How: called before each letter is written."""

    @property
    def inputs(self) -> Mapping[str, Input]:
        return {"read": self.read}

    def run(self, out: Path) -> Facts:
        for letter in self.settings.letters:
            target = out / f"{letter}.txt"
            if target.exists():
                continue
            self.before(letter, out)
            with atomic_write(target) as part:
                part.write_text(letter * (2 if self.settings.doubled else 1))
            if self.journal:
                with self.journal.open("a") as stream:
                    stream.write(letter)
        return {"letters": len(self.settings.letters)}


@dataclass(frozen=True)
class Prepare(Letters):
    name: ClassVar[str] = "prepare"


@dataclass(frozen=True)
class Pack(Letters):
    name: ClassVar[str] = "pack"


@dataclass(frozen=True)
class Train(Letters):
    name: ClassVar[str] = "train"


@dataclass(frozen=True)
class Export(Letters):
    name: ClassVar[str] = "export"


def step_of(stage: Stage, root: Path) -> PlannedStage:
    return PlannedStage(stage, root / stage.name / short(stage_key(stage)))


@dataclass(frozen=True)
class Slowly:
    """Takes a while before the first letter, so that another process comes second."""

    seconds: float

    def __call__(self, letter: str, out: Path) -> None:
        if letter == "a":
            (out.parent / "begun").touch()
            time.sleep(self.seconds)


@dataclass(frozen=True)
class UntilThere:
    """Waits before the first letter until a file is there, at most half a minute."""

    file: Path

    def __call__(self, letter: str, out: Path) -> None:
        if letter == "a":
            (out.parent / "begun").touch()
            for _ in range(3000):
                if self.file.exists():
                    return
                time.sleep(0.01)


@dataclass(frozen=True)
class Dying:
    """Ends this process as a crash does, before `at` is written."""

    at: str

    def __call__(self, letter: str, _out: Path) -> None:
        if letter == self.at:
            os.kill(os.getpid(), 9)
