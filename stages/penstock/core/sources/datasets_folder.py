"""Folders of `datasets.save_to_disk`: a Dataset, or a DatasetDict with one folder per split. The
metadata files list the data files and their order. Other files in the folder are caches."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.core.errors import ConfigError

STATE = "state.json"
SPLITS = "dataset_dict.json"
# A split's name, which is also a folder name and must not contain path separators.
SPLIT = re.compile(r"\w+(\.\w+)*")


def saved_files(folder: Path, path: str) -> tuple[Path, ...]:
    """The Arrow files of a data set in order. Raises ConfigError if the metadata names a missing
    file."""
    state = _read_metadata(folder / STATE, path)
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"{path} was saved with an indices mapping, by an old release of datasets.\n"
            "  Write it again: load_from_disk(…).flatten_indices().save_to_disk(…)."
        )
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / STATE} does not list the files of {path}.\n  Save it again."
        ) from error
    for name in names:
        # The metadata is not trusted: a name must not lead out of the folder.
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(
                f"{path} is incomplete: {STATE} lists {name}, which does not exist.\n"
                "  Save it again, or copy the missing file."
            )
    if not names:
        raise ConfigError(f"{path} was saved without any data.\n  Save it again.")
    return tuple(folder / name for name in names)


@dataclass(frozen=True)
class SavedFolder:
    """A saved folder; `splits` is None for a single data set."""

    root: Path
    splits: tuple[str, ...] | None

    def select_split(self, path: str, split: str | None) -> Path:
        """The folder of the requested split; by default `train`, or the only one."""
        if self.splits is None:
            if split not in (None, "train"):
                raise ConfigError(
                    f"split is {split!r}, but {path} was saved as a single data set.\n"
                    "  Leave split out."
                )
            return self.root
        only = self.splits[0] if len(self.splits) == 1 else None
        split_name = split or ("train" if "train" in self.splits else only)
        if split_name is None or split_name not in self.splits or not SPLIT.fullmatch(split_name):
            raise ConfigError(
                f"{path} has the splits {', '.join(self.splits)}, and split is {split!r}.\n"
                "  Set split to one of them."
            )
        return self.root / split_name


def read_saved_folder(folder: Path) -> SavedFolder | None:
    """Parse the metadata in `folder`; None if save_to_disk did not write it."""
    if (folder / SPLITS).is_file():
        splits = _read_metadata(folder / SPLITS, str(folder)).get("splits")
        names = tuple(str(split) for split in cast("list[Any]", splits or []))
        if not names or not all(SPLIT.fullmatch(name) for name in names):
            raise ConfigError(f"{folder / SPLITS} does not list splits.\n  Save the data again.")
        return SavedFolder(folder, names)
    return SavedFolder(folder, None) if (folder / STATE).is_file() else None


def _read_metadata(file: Path, path: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}.\n  {path} may be half written: save it again."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a JSON object.\n  Save {path} again.")
    return cast("dict[str, Any]", value)
