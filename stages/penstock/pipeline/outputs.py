"""The output folders of a run; they are checked to be writable before any work."""

from collections.abc import Iterable, Mapping

from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import find_cached
from penstock.core.errors import ConfigError
from penstock.core.file_lock import refusal_to_write
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.urls import is_url
from penstock.estimate.machine import needs_login, require_push
from penstock.pipeline.plan import Plan

FOLDER_STAGES = {
    "data.dataset_prepared_path": ("prepare", "encode", "pack", "reference"),
    "train.output_dir": ("train",),
    "pipeline.artifacts_path": ("export", "push"),
}
"""The fields that name output folders, and the stages that write there."""


def output_folders(run: RunConfig, stages: Iterable[str]) -> dict[str, str]:
    """The local folders that these stages write to, by the fields that name them."""
    folders = {
        "data.dataset_prepared_path": run.data.dataset_prepared_path,
        "train.output_dir": run.train.output_dir,
        "pipeline.artifacts_path": run.pipeline.artifacts_path,
    }
    stage_names = set(stages)
    if stage_names.intersection(run.pipeline.extra_stages):
        # Stages of packages write where the exported model is.
        stage_names.add("export")
    return {
        name: folder
        for name, folder in folders.items()
        if not is_url(folder) and stage_names.intersection(FOLDER_STAGES[name])
    }


def find_unwritable(folders: Mapping[str, str]) -> list[str]:
    """A line for each field whose folder is not writable."""
    return [
        f"{name} {folder} cannot be written to: {reason}"
        for name, folder in folders.items()
        if (reason := refusal_to_write(local_cache_dir(folder).absolute()))
    ]


def require_writable(planned: Plan) -> None:
    """Raise ConfigError if the folder of a stage without a result is not writable, and
    CapabilityError for a push to the hub without a login."""
    missing = [step.stage.name for step in planned.steps if find_cached(step) is None]
    if refusals := find_unwritable(output_folders(planned.run, missing)):
        raise ConfigError(
            "\n".join([*refusals, "  Name folders that can be written to, or change their modes."])
        )
    if "push" in missing and needs_login(planned.run):
        require_push(planned.run)
