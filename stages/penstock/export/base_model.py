"""What a model was made from, as its card tells it: never the path of a folder of somebody's."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from penstock.core.errors import PenstockError
from penstock.core.remote.urls import redact
from penstock.core.sources.hub import local_folder
from penstock.engine.model_source import ModelSource
from penstock.export.licence import CARD, TEXTS, Licence, licence_in

_SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
"""How the hub's cache names the folder of a commit."""


@dataclass(frozen=True)
class BaseModel:
    """A model that was there before."""

    name: str
    """What people call it."""
    repo: str | None = None
    """On the hub; None where it is not known to be there."""
    commit: str | None = None
    licence: Licence | None = None
    folder: Path | None = None
    """On this machine, with its licence's texts; None where they could not be had."""


def read_base_model(origin: ModelSource) -> BaseModel | None:
    """The model that training started from; None where it started at random."""
    if origin.weights is None or origin.model_path is None:
        return None
    pin = origin.weights.pin
    if pin["kind"] != "hub":
        return base_in(local_folder(origin.model_path, origin.weights), _called(origin.model_path))
    try:
        folder = local_folder(origin.model_path, origin.weights, (CARD, *TEXTS))
    except PenstockError:
        # The weights are in the checkpoint; a card without its licence is better than none.
        folder = None
    licence = licence_in(folder) if folder else None
    return BaseModel(pin["repo"], pin["repo"], pin["commit"], licence, folder)


def base_in(folder: Path, name: str | None = None) -> BaseModel:
    """The model in `folder`, which the hub's cache may have put there."""
    licence = licence_in(folder)
    if found := _SNAPSHOT.search(folder.resolve().as_posix()):
        repo = found["repo"].replace("--", "/")
        return BaseModel(repo, repo, found["commit"], licence, folder)
    return BaseModel(name or folder.resolve().name, None, None, licence, folder)


def _called(typed: str) -> str:
    return PurePath(redact(typed)).name or typed
