"""Output folders that are also input folders, by their paths."""

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.config.loading.fault import ConfigIssue, Issues, dotted
from penstock.config.schema.run import RunConfig
from penstock.core.remote.urls import is_url

INSTEAD = "write a folder of its own, such as outputs/my-run"


SYSTEM = frozenset(
    f"/{name}"
    for name in (
        *("", "bin", "boot", "dev", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc"),
        *("root", "run", "sbin", "srv", "sys", "tmp", "usr", "var"),
    )
)
"""Folders of the Filesystem Hierarchy Standard, which every program shares."""


def check_shared_folders(run: RunConfig) -> Issues:
    """Output folders that are a folder of the system, or a user's home."""
    for path, folder in {
        ("data", "dataset_prepared_path"): run.data.dataset_prepared_path,
        ("train", "output_dir"): run.train.output_dir,
        ("pipeline", "artifacts_path"): run.pipeline.artifacts_path,
    }.items():
        if not is_url(folder) and str(_normalize(folder)) in {*SYSTEM, str(Path.home())}:
            yield ConfigIssue(path, f"{folder} is a folder of other programs too; {INSTEAD}")


def check_output_dir(run: RunConfig) -> Issues:
    """`train.output_dir` that is the current folder, one above it, or the model's or data's."""
    output, path = run.train.output_dir, ("train", "output_dir")
    if is_url(output):
        return
    normalized = _normalize(output)
    if set(normalized.parts) <= {".."}:
        yield ConfigIssue(path, f"{output} is the current folder, or one above; {INSTEAD}")
        return
    for name, other in _input_paths(run):
        if _normalize(other) == normalized:
            yield ConfigIssue(
                path, f"{output} is {name} too, and would be overwritten; {INSTEAD}", (name,)
            )


def _input_paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings that name folders to read, with their values."""
    models = {
        "model.model_path": run.model.model_path,
        "model.config_path": run.model.config_path,
        "model.tokenizer_path": run.model.tokenizer_path,
        "lora.init_adapter_path": run.lora.init_adapter_path,
    }
    for kind, encoder in run.model.encoders.items():
        models[f"model.encoders.{kind}.model_path"] = encoder.model_path
        models[f"model.encoders.{kind}.config_path"] = encoder.config_path
    yield from ((name, path) for name, path in models.items() if path)
    for field in ("datasets", "test_datasets"):
        for index, entry in enumerate(getattr(run.data, field)):
            yield dotted(("data", field, index, "path")), entry.path


def _normalize(path: str) -> Path:
    """The normalized path; empty for the current folder."""
    return Path(os.path.normpath(os.path.expanduser(path)))  # noqa: PTH111 - never raises
