"""What a stage is, and the key that names its result.

A stage is a frozen description of work. Its key is a digest of everything that decides the
*content* of the result and of nothing else: the stage's name and version, its settings, and the
keys of what it reads. How the work is done (worker counts, devices, log levels) lives in the other
fields of the stage, which `identity` does not read.
"""

import errno
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.record import digest_json
from penstock.core.files import PART, regular_files

ATTEMPT = "attempt.json"
ERROR_LOG = "error.log"

Facts = Mapping[str, Any]
"""What a stage reports of its result (counts, sizes); kept in the manifest, never in the key."""


@dataclass(frozen=True)
class Source:
    """Data from outside, pinned to its content. `pin` is identity; `paths` only say where to read.

    `pin` is plain JSON: for local files their names, sizes and SHA-256; for the hub the repository
    and its commit; for built-in data its name and version.
    """

    pin: Mapping[str, Any]
    paths: tuple[Path, ...] = field(default=(), compare=False)
    urls: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Where remote files lie, in place of paths. They may be signed, so they are never shown."""

    @cached_property
    def key(self) -> str:
        """64 hex digits that change with the content."""
        return digest_json(dict(self.pin))


@dataclass(frozen=True)
class Artifact:
    """A stage's result by name: where it lies, or will lie once the stage has run."""

    stage: str
    key: str
    path: Path
    remote: str | None = field(default=None, compare=False)
    """The URL it is kept behind; `path` is its mirror on this machine then."""

    @property
    def manifest(self) -> dict[str, Any]:
        """The sealed manifest.

        Raises FileNotFoundError while the stage has not run, ArtifactError for a damaged one.
        """
        manifest = read_manifest(self.path)
        if manifest is None:
            raise FileNotFoundError(errno.ENOENT, "has no manifest", str(self.path / MANIFEST))
        return manifest

    @property
    def facts(self) -> dict[str, Any]:
        """What the stage said of its result."""
        return self.manifest["facts"]


Input = Artifact | Source


@dataclass(frozen=True)
class Stage(ABC):
    """One step of the pipeline. Implementations are frozen dataclasses.

    `settings` and `inputs` are the identity. `neutral` names settings (dotted) with the value at
    which they leave the result as it was before they existed, so that adding them retires nothing.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    neutral: ClassVar[Mapping[str, Any]] = {}

    settings: BaseModel

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, Input]:
        """What the stage reads, by name."""

    @abstractmethod
    def run(self, out: Path) -> Facts:
        """Fill `out`, which may hold an earlier unfinished attempt, and return the facts.

        Facts are plain JSON and, like every file the stage owns, the same after any interruption.
        """

    def keepsakes(self, out: Path) -> list[list[Path]]:
        """What an unfinished `out` holds that another machine could go on from, for outputs that
        are kept behind a URL: groups of files, each of use only after those before it, and last
        the files that go on changing. By default nothing.
        """
        del out
        return []

    def wanted(self, names: Collection[str], out: Path) -> list[str]:
        """Of the keepsakes by these names that lie elsewhere, those to go on from, in the order
        they are to be fetched; none when `out` holds better ones. Asked again, without those
        names, once they are fetched.
        """
        del names, out
        return []

    def owned_files(self, out: Path) -> Iterable[Path]:
        """The files the manifest lists and vouches for; by default all that `run` left."""
        aside = {out / MANIFEST, out / ATTEMPT, out / ERROR_LOG}
        return [p for p in regular_files(out) if p not in aside and p.suffix != PART]


def identity(stage: Stage) -> dict[str, Any]:
    """Everything that decides the content of the stage's result, as plain JSON values."""
    settings = stage.settings.model_dump(mode="json")
    for dotted, value in stage.neutral.items():
        _drop_if(settings, dotted.split("."), value)
    return {
        "stage": stage.name,
        "version": stage.version,
        "settings": settings,
        "inputs": {name: source.key for name, source in stage.inputs.items()},
    }


def stage_key(stage: Stage) -> str:
    """The whole key, 64 hex digits."""
    return digest_json(identity(stage))


def short(key: str) -> str:
    """The first 16 digits of a key: what folders are called."""
    return key[:16]


def _drop_if(settings: dict[str, Any], steps: list[str], value: Any) -> None:
    for step in steps[:-1]:
        settings = settings[step]
    if settings.get(steps[-1]) == value:
        del settings[steps[-1]]
