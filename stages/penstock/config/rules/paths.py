"""Folders for results that are somebody else's, told from the paths alone."""

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.config.loading.fault import ConfigIssue, dotted
from penstock.config.rules.data import Faults
from penstock.config.schema.run import RunConfig
from penstock.core.remote.urls import is_url

INSTEAD = "write a folder of its own, such as outputs/my-run"


def results_have_a_folder_of_their_own(run: RunConfig) -> Faults:
    """`train.output_dir` that is the folder one is in, or holds the model or the data."""
    output, path = run.train.output_dir, ("train", "output_dir")
    if is_url(output):
        return
    here = _plain(output)
    if set(here.parts) <= {".."}:
        yield ConfigIssue(
            path, f"{output} is the folder that the command runs in, or one above; {INSTEAD}"
        )
        return
    for name, other in _read(run):
        if _plain(other) == here:
            yield ConfigIssue(
                path, f"{output} is {name} too, and would be written over; {INSTEAD}", (name,)
            )


def _read(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings that name folders to read, with their values."""
    models = {
        "model.model_path": run.model.model_path,
        "model.config_path": run.model.config_path,
        "model.tokenizer_path": run.model.tokenizer_path,
        "lora.init_adapter_path": run.lora.init_adapter_path,
    }
    yield from ((name, path) for name, path in models.items() if path)
    for field in ("datasets", "test_datasets"):
        for index, entry in enumerate(getattr(run.data, field)):
            yield dotted(("data", field, index, "path")), entry.path


def _plain(path: str) -> Path:
    """The path without steps that lead nowhere; empty for the folder one is in."""
    return Path(os.path.normpath(Path(path).expanduser()))
