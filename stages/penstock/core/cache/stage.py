"""The Stage interface and its cache key.

A stage is a frozen description of work. Its key is a digest of everything that determines the
*content* of the result and of nothing else: the stage's name and version, its settings, and the
keys of its inputs. How the work is done (worker counts, devices, log levels) is stored in other
fields, which `identity` does not read.
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
"""Facts that a stage reports about its result (counts, sizes); stored in the manifest, not in the
key."""


@dataclass(frozen=True)
class Source:
    """External data, pinned to its content. `pin` is part of the identity; `paths` only locate the
    files.

    `pin` is plain JSON. For local files: names, sizes and SHA-256. For the Hugging Face Hub: the
    repository and its commit. For built-in data: name and version.
    """

    pin: Mapping[str, Any]
    paths: tuple[Path, ...] = field(default=(), compare=False)
    urls: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Locations of remote files, used instead of `paths`. They may be signed, so they are never
    displayed."""

    # cached_property writes to __dict__, past the __setattr__ with which a frozen dataclass
    # refuses.
    @cached_property
    def key(self) -> str:
        """64 hex digits that depend only on the content."""
        return digest_json(dict(self.pin))


@dataclass(frozen=True)
class Artifact:
    """A stage's result: the folder where it is, or will be once the stage has run."""

    stage: str
    key: str
    path: Path
    remote: str | None = field(default=None, compare=False)
    """The URL of a remote artifact; `path` is then its local mirror."""

    @property
    def manifest(self) -> dict[str, Any]:
        """Raises FileNotFoundError if the stage has not run, ArtifactError for a damaged one."""
        manifest = read_manifest(self.path)
        if manifest is None:
            raise FileNotFoundError(errno.ENOENT, "has no manifest", str(self.path / MANIFEST))
        return manifest

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest["facts"]


Input = Artifact | Source


@dataclass(frozen=True)
class Stage(ABC):
    """A stage of the pipeline. Implementations are frozen dataclasses.

    `settings` and `inputs` are the identity. `neutral` maps settings (dotted names) to the default
    at which they are left out of the cache key, so that adding a setting does not invalidate
    existing results.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    neutral: ClassVar[Mapping[str, Any]] = {}

    verifies_sources: ClassVar[bool] = False
    """Whether `run` itself verifies its sources, once they are loaded; they may change later. Those
    of other stages must be unchanged until the end."""

    settings: BaseModel

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, Input]:
        """The inputs of the stage, by name."""

    @abstractmethod
    def run(self, out: Path) -> Facts:
        """Run the stage in `out`, which may hold an incomplete attempt, and return the facts.

        Facts are plain JSON. Like every file that the stage owns, they are the same after any
        interruption.
        """

    def outside_changes(self) -> list[str]:
        """What a complete result left outside of its folder and is gone: the stage runs again."""
        return []

    def files_to_upload(self, out: Path) -> list[list[Path]]:
        """Intermediate files of an incomplete `out` to upload to a remote store, so that another
        machine can resume. Ordered groups of files, each usable only with those before it; files
        that keep changing come last. By default none."""
        del out
        return []

    def files_to_download(self, names: Collection[str], out: Path) -> list[str]:
        """Select the `names` of remote intermediate files to resume from, in download order. Empty
        if `out` has newer ones. Called again without those names after they are downloaded."""
        del names, out
        return []

    def owned_files(self, out: Path) -> Iterable[Path]:
        """The files that the manifest lists and verifies; by default all files that `run` wrote."""
        aside = {out / MANIFEST, out / ATTEMPT, out / ERROR_LOG}
        return [p for p in regular_files(out) if p not in aside and p.suffix != PART]


def identity(stage: Stage) -> dict[str, Any]:
    """Everything that determines the content of the stage's result, as plain JSON."""
    settings = stage.settings.model_dump(mode="json")
    for dotted, value in stage.neutral.items():
        *sections, name = dotted.split(".")
        section = settings
        for step in sections:
            section = section[step]
        if section.get(name) == value:
            del section[name]
    return {
        "stage": stage.name,
        "version": stage.version,
        "settings": settings,
        "inputs": {name: source.key for name, source in stage.inputs.items()},
    }


def stage_key(stage: Stage) -> str:
    """The full cache key, 64 hex digits."""
    return digest_json(identity(stage))


def short(key: str) -> str:
    """The first 16 hex digits of a key, used as folder name."""
    return key[:16]
