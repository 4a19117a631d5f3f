"""Reject data sources that contain prepared data: each run would read the output of the last."""

from pathlib import Path

from penstock.config.schema.dataset import DatasetConfig
from penstock.core.cache.stage import Source
from penstock.core.errors import ConfigError
from penstock.core.remote.urls import local_path
from penstock.core.sources.datasets_folder import read_saved_folder
from penstock.core.sources.local_files import NOT_DATA

_KINDS = ("json", "arrow")
"""`ds_type` of the files that runs write."""


def require_not_own_files(
    field: str, dataset: DatasetConfig, source: Source, root: Path, own_folders: tuple[str, ...]
) -> None:
    """Raise ConfigError if the source's files include files that runs write in `root`, or would.

    `root` is `data.dataset_prepared_path`, `own_folders` are its subfolders that runs write.
    `field` is the full name of the data set's field `path`.
    """
    why = _conflict(dataset, source, root.resolve(), own_folders)
    if why:
        raise ConfigError(
            f"{field} {dataset.path} {why} data.dataset_prepared_path {root}, so the next run "
            "would read prepared data.\n"
            "  Set data.dataset_prepared_path to a folder outside the data, or list the data files "
            "in data_files."
        )


def _conflict(
    dataset: DatasetConfig, source: Source, root: Path, own_folders: tuple[str, ...]
) -> str | None:
    folders = {folder: folder.resolve() for folder in {file.parent for file in source.paths}}
    own = {
        folder
        for folder, real in folders.items()
        if real.is_relative_to(root)
        and real.relative_to(root).parts[:1] in {(n,) for n in own_folders}
    }
    if own:
        files = [file for file in source.paths if file.parent in own]
        return f"has {len(files)} files ({files[0]} is one) that runs have written in"
    folder = Path(local_path(dataset.path)).expanduser()
    is_read_whole = dataset.ds_type in (None, *_KINDS) and not dataset.data_files
    if not (folders and is_read_whole and folder.is_dir() and not read_saved_folder(folder)):
        return None
    searched = folder.resolve()
    # Data files are not looked for in hidden folders.
    if root.is_relative_to(searched) and not any(
        map(NOT_DATA.fullmatch, root.relative_to(searched).parts)
    ):
        return "is a folder that is read whole, and is or contains"
    return None
