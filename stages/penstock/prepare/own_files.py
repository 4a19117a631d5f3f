"""A source must not be what is made of it: what a run prepares would be new data for the next."""

from pathlib import Path

from penstock.config.schema.dataset import DatasetConfig
from penstock.core.cache.stage import Source
from penstock.core.errors import ConfigError
from penstock.core.remote.urls import local_path
from penstock.core.sources.datasets_folder import saved_in
from penstock.core.sources.local_files import NOT_DATA

_KINDS = ("json", "arrow")
"""What results consist of, as `ds_type` calls it."""


def require_not_own_files(
    field: str, dataset: DatasetConfig, source: Source, root: Path, made: tuple[str, ...]
) -> None:
    """Raise ConfigError where what runs make in `root` is among the source's files, or would be.

    `made` are the folders in `root`, which is `data.dataset_prepared_path`. `field` is the name of
    the dataset's field `path`.
    """
    why = _conflict(dataset, source, root.resolve(), made)
    if why:
        raise ConfigError(
            f"{field} {dataset.path} {why} data.dataset_prepared_path {root}, so what is prepared "
            "would be data to prepare the next time.\n"
            "  Set data.dataset_prepared_path to a folder outside the data, or name the files that "
            "are meant in data_files."
        )


def _conflict(
    dataset: DatasetConfig, source: Source, root: Path, made: tuple[str, ...]
) -> str | None:
    folders = {folder: folder.resolve() for folder in {file.parent for file in source.paths}}
    own = {
        folder
        for folder, real in folders.items()
        if real.is_relative_to(root) and real.relative_to(root).parts[:1] in {(n,) for n in made}
    }
    if own:
        files = [file for file in source.paths if file.parent in own]
        return f"has {len(files)} files ({files[0]} is one) that runs have made in"
    folder = Path(local_path(dataset.path)).expanduser()
    if folders and _is_read_whole(dataset, folder) and _search_reaches(folder.resolve(), root):
        return "is a folder that is read whole, and is or contains"
    return None


def _is_read_whole(dataset: DatasetConfig, folder: Path) -> bool:
    """Whether all files in it are the source's that look like data of ours."""
    is_ours = dataset.ds_type in (None, *_KINDS)
    return is_ours and not dataset.data_files and folder.is_dir() and not saved_in(folder)


def _search_reaches(folder: Path, root: Path) -> bool:
    """Whether the search for data in `folder` comes to `root`: it passes by hidden folders."""
    if not root.is_relative_to(folder):
        return False
    return not any(map(NOT_DATA.fullmatch, root.relative_to(folder).parts))
