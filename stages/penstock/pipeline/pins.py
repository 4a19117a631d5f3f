"""Pins the data sources and checkpoints that a run reads to their content."""

from pathlib import Path

from penstock.config.loading.fault import dotted
from penstock.config.rules.effect import iter_effect_notices
from penstock.config.rules.run import rule_violations
from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import Source
from penstock.core.errors import ConfigError
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.urls import is_url, redact
from penstock.core.sources.nxd_checkpoint import reject_nxd_checkpoint
from penstock.core.sources.pin import incomplete_checkpoint, is_checkpoint, pin_checkpoint, pin_data
from penstock.encode.stage import FEATURES, Encode
from penstock.pack.stage import Pack
from penstock.prepare.own_files import require_not_own_files
from penstock.prepare.stage import SLICES, Prepare
from penstock.reference.stage import SCORES, Reference

RESULT_FOLDERS = (
    *(SLICES, FEATURES, SCORES),
    *(Prepare.name, Encode.name, Pack.name, Reference.name),
)
"""Folders that Penstock itself writes in data.dataset_prepared_path."""

DATASET_FIELDS = ("datasets", "test_datasets", "decontaminate_datasets")
"""Fields of the section `data` that name sources."""

UNREAD = Source({"kind": "unread"})
"""In place of a source with a weight of 0, whose content no result depends on."""


def pin_sources(run: RunConfig, field: str) -> tuple[Source, ...]:
    """Pin the sources in a field of the section `data`. Raises ConfigError for the run's own
    outputs."""
    data = run.data
    datasets: list[DatasetConfig] = getattr(data, field)
    sources = tuple(
        pin_dataset(dataset, data.hf_use_auth_token) if dataset.is_read else UNREAD
        for dataset in datasets
    )
    root = local_cache_dir(data.dataset_prepared_path)
    for index, (dataset_config, source) in enumerate(zip(datasets, sources, strict=True)):
        if source is UNREAD:
            continue
        require_not_own_files(
            f"data.{field}[{index}].path", dataset_config, source, root, RESULT_FOLDERS
        )
        _require_image_folder(f"data.{field}.{index}.image_folder", dataset_config.image_folder)
    return sources


def _require_image_folder(location: str, folder: str | None) -> None:
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise ConfigError(
            f"{location} is {redact(folder)}, which is no folder of this machine.\n"
            "  Write the folder to which the paths of images in the data are relative."
        )


def resolve_dataset_types(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The run with the types of its data sets, and a line for each type that was inferred from the
    first records, and for what has no effect on samples of these types. Raises ConfigError if a
    type cannot be inferred."""
    notes: list[str] = []
    lists: dict[str, list[DatasetConfig]] = {}
    for name in DATASET_FIELDS:
        if written := getattr(run.data, name):
            lists[name] = [
                resolve_dataset_type(run, f"data.{name}.{index}", dataset, notes)
                for index, dataset in enumerate(written)
            ]
    if not notes:
        return run, ()
    resolved = run.with_fields("data", **lists)
    if faults := [f"{dotted(fault.path)}: {fault.text}" for fault in rule_violations(resolved)]:
        raise ConfigError("\n".join([*faults, *notes]))
    notices = {*iter_effect_notices(run)}
    notes += (line for line in iter_effect_notices(resolved) if line not in notices)
    return resolved, tuple(notes)


def resolve_dataset_type(
    run: RunConfig, location: str, dataset: DatasetConfig, notes: list[str]
) -> DatasetConfig:
    """The data set with its type; a line is added to `notes` if it was inferred from the first
    records. Raises ConfigError if it cannot be inferred."""
    if dataset.is_typed or not dataset.is_read:
        return dataset
    # Imported only for runs that do not set all types.
    from penstock.prepare.dataset_type import infer_dataset_type  # noqa: PLC0415

    token = run.data.hf_use_auth_token
    inferred = infer_dataset_type(
        dataset,
        pin_dataset(dataset, token),
        location=location,
        objective=run.train.objective,
        token=token,
        max_record_bytes=run.data.max_record_bytes,
    )
    if inferred is None:
        return dataset
    notes.append(f"{location} ({redact(dataset.path)}) is read as {inferred}")
    return dataset.model_copy(update=inferred.settings())


def pin_dataset(dataset: DatasetConfig, token: bool | None) -> Source:
    """Pin a data set to its content. Raises ConfigError if it does not exist."""
    source = pin_data(
        dataset.path,
        name=dataset.name,
        # With splits_string, documents are assigned to splits; files are not selected by split.
        split=None if dataset.splits_string else dataset.split,
        revision=dataset.revision,
        data_files=dataset.data_files,
        ds_type=dataset.ds_type,
        token=token,
    )
    if dataset.streaming and source.pin["kind"] != "hub":
        raise ConfigError(
            f"{dataset.path} is local, and only a dataset of the hub is streamed.\n"
            "  Leave streaming out: local files are read incrementally anyway."
        )
    return source


def pin_load_checkpoint(run: RunConfig) -> Source | None:
    """Pin `train.load_checkpoint_path`, if it names a checkpoint."""
    path = run.train.load_checkpoint_path
    if path is None or path == "auto":
        return None
    reject_nxd_checkpoint(path, "train.load_checkpoint_path")
    return pin_checkpoint(path)


def pin_init_checkpoint(run: RunConfig) -> Source | None:
    """Pin `train.init_checkpoint_path`, if it names a checkpoint; only its weights are loaded."""
    path = run.train.init_checkpoint_path
    if path is None or not is_checkpoint(path):
        return None
    return pin_checkpoint(path, "train.init_checkpoint_path")


def check_checkpoints(run: RunConfig) -> None:
    """Raise what the two functions above raise for local folders, without reading weights."""
    for name in ("load_checkpoint_path", "init_checkpoint_path"):
        path = getattr(run.train, name)
        if path is None or path == "auto" or is_url(path):
            continue
        reject_nxd_checkpoint(path, f"train.{name}")
        if name == "init_checkpoint_path" and not is_checkpoint(path):
            continue  # a model's folder
        if not (Path(path).expanduser() / "COMPLETE").is_file():
            raise incomplete_checkpoint(path, f"train.{name}")
