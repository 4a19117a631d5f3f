"""Base model name for model cards; never a local path."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from penstock.core.errors import PenstockError
from penstock.core.remote.urls import redact
from penstock.core.sources.hub import local_folder
from penstock.engine.model_source import ModelSource
from penstock.export.licence import CARD, TEXTS, Licence, licence_in

_SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
"""Pattern of a commit's folder in the Hub cache."""


@dataclass(frozen=True)
class BaseModel:
    """The base model of a fine-tuned model."""

    name: str
    """The name shown to users."""
    repo: str | None = None
    """The Hub repository; None if unknown."""
    commit: str | None = None
    licence: Licence | None = None
    folder: Path | None = None
    """The local folder with its license texts; None if not available."""


def read_base_model(origin: ModelSource) -> BaseModel | None:
    """The model that training started from; None for random initialization."""
    if origin.weights is None or origin.model_path is None:
        return None
    pin = origin.weights.pin
    if pin["kind"] != "hub":
        return base_in(local_folder(origin.model_path, origin.weights), _called(origin.model_path))
    try:
        folder = local_folder(origin.model_path, origin.weights, (CARD, *TEXTS))
    except PenstockError:
        # The weights are in the checkpoint; a card without a license is better than none.
        folder = None
    licence = licence_in(folder) if folder else None
    return BaseModel(pin["repo"], pin["repo"], pin["commit"], licence, folder)


def base_in(folder: Path, name: str | None = None) -> BaseModel:
    """The model in `folder`, which may be in the Hub cache."""
    licence = licence_in(folder)
    if found := _SNAPSHOT.search(folder.resolve().as_posix()):
        repo = found["repo"].replace("--", "/")
        return BaseModel(repo, repo, found["commit"], licence, folder)
    return BaseModel(name or folder.resolve().name, None, None, licence, folder)


def _called(typed: str) -> str:
    return PurePath(redact(typed)).name or typed
