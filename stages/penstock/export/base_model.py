"""Base model name for model cards; never a local path."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from penstock.core.cache.manifest import read_manifest
from penstock.core.errors import ArtifactError, PenstockError
from penstock.core.remote.urls import redact
from penstock.core.sources.hub import local_folder
from penstock.engine.model_source import ModelSource
from penstock.export.license import CARD, LICENSE_PATTERNS, License, detect_license

_SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
"""Pattern of a commit's folder in the Hub cache."""


COMPOSE = "compose"  # The stage whose results are composed models
PARTS = ("text", "image")  # Their parts, as its inputs are named


@dataclass(frozen=True)
class BaseModel:
    """The base model of a fine-tuned model."""

    name: str  # The name shown to users
    repo: str | None = None  # The Hub repository; None if unknown
    commit: str | None = None
    license: License | None = None
    folder: Path | None = None  # The local folder with its license texts; None if not available
    parts: tuple["BaseModel", ...] = ()  # The models that it was composed of (`model.encoders`)
    drawn: bool = False  # Whether its weights were drawn at random

    @property
    def repos(self) -> list[str]:
        """The Hub repositories whose weights it has, of those that are known."""
        return [part.repo for part in self.parts or (self,) if part.repo and not part.drawn]


def read_base_model(origin: ModelSource) -> BaseModel | None:
    """The model that training started from; None for random initialization."""
    if origin.weights is None or origin.model_path is None:
        return None
    pin = origin.weights.pin
    if pin["kind"] != "hub":
        name = PurePath(redact(origin.model_path)).name or origin.model_path
        return read_model_folder(local_folder(origin.model_path, origin.weights), name)
    try:
        folder = local_folder(origin.model_path, origin.weights, (CARD, *LICENSE_PATTERNS))
    except PenstockError:
        # The weights are in the checkpoint; a card without a license is better than none.
        folder = None
    license_ = detect_license(folder) if folder else None
    return BaseModel(pin["repo"], pin["repo"], pin["commit"], license_, folder)


def read_model_folder(folder: Path, name: str | None = None) -> BaseModel:
    """The model in `folder`, which may be in the Hub cache."""
    license_ = detect_license(folder)
    if match := _SNAPSHOT.search(folder.resolve().as_posix()):
        repo = match["repo"].replace("--", "/")
        return BaseModel(repo, repo, match["commit"], license_, folder)
    if parts := _read_parts(folder):
        title = " with ".join(part.name.rpartition("/")[2] for part in parts)
        return BaseModel(title, None, None, license_, folder, parts)
    return BaseModel(name or folder.resolve().name, None, None, license_, folder)


def _read_parts(folder: Path) -> tuple[BaseModel, ...]:
    """The text model and the encoder of a composed model; empty for another one."""
    try:
        manifest = read_manifest(folder.resolve().parent)
    except ArtifactError:
        return ()  # a file of that name beside a model of the user's
    if manifest is None or manifest.get("stage") != COMPOSE:
        return ()
    inputs, names = manifest["inputs"], manifest["facts"].get("names", {})
    parts: list[BaseModel] = []
    for kind in filter(names.__contains__, PARTS):
        weights = inputs.get(f"{kind}_weights")
        pin = (weights or inputs[f"{kind}_config"])["source"]
        parts.append(
            BaseModel(names[kind], pin.get("repo"), pin.get("commit"), drawn=weights is None)
        )
    return tuple(parts)
