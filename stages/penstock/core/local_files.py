"""Which files on this machine a path the user typed stands for.

Nothing here reads content. Every fault is a ConfigError that repeats the path as it was typed.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError

KINDS: dict[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl"),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt",),
}
"""What `ds_type` may say, and the file names that say it by themselves."""

SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)

NOT_DATA = re.compile(
    r"[._].*|readme.*|licen[cs]e.*|state\.json|dataset_(info|infos|dict)\.json", re.IGNORECASE
)
"""What lies in data folders without being data: hidden files, notices, notes of `datasets`."""

SPLIT_WORDS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Found:
    """Files in reading order, named relative to `root`; `label` is what people call the data."""

    label: str
    root: Path
    paths: tuple[Path, ...]

    def name_of(self, path: Path) -> str:
        """How a pin names the file: below the root where it lies there, else its last part."""
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        return path.name


def looks_local(path: str) -> bool:
    """Whether an absent path was meant as a file: its form or its surroundings say so."""
    return (
        path.startswith((".", "/", "~"))
        or path.endswith(SUFFIXES)
        or bool(GLOB.search(path))
        or path.count("/") > 1
        or ("/" in path and Path(path).parent.exists())
    )


def find_data(
    path: str, *, split: str | None, data_files: Sequence[str] | None, ds_type: str | None
) -> Found:
    """The data files `path` names: a file, a glob, or a folder (all of it, or its `data_files`).

    A folder whose files bear the names of splits gives those of `split`, or of `train`. Raises
    ConfigError when there is nothing, or nothing of the asked kind.
    """
    if split and not re.fullmatch(r"\w+", split):
        raise ConfigError(
            f"split is {split!r}, but parts of a split cannot be taken from local files yet.\n"
            f"  Give {path} as files that hold what you want, and leave split out."
        )
    target = Path(path).expanduser()
    if GLOB.search(path) and not target.exists():
        found = _glob(path, target)
    elif target.is_dir():
        found = _folder(path, target, split, data_files, ds_type)
    elif target.exists():
        _refuse_data_files(path, data_files)
        found = Found(target.name, target.parent, (target,))
    else:
        raise missing(path)
    for file in found.paths:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder where a file is meant.\n  Name its files.")
        if ds_type is None and file.suffix not in SUFFIXES:
            raise ConfigError(
                f"{found.name_of(file)} (of {path}) does not say what kind of file it is.\n"
                f"  Write ds_type: one of {', '.join(KINDS)}."
            )
    _refuse_other_split(path, found, split)
    return found


def missing(path: str) -> ConfigError:
    """The error for a local path that is not there, with the names that are near it."""
    target = Path(path).expanduser()
    parent = target.parent
    if not parent.is_dir():
        return ConfigError(
            f"{path} does not exist, and neither does the folder {Path(path).parent}.\n"
            f"  Paths are relative to the folder the command runs in ({Path.cwd().name}/)."
        )
    near = difflib.get_close_matches(target.name, names_in(parent), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it holds {_some(names_in(parent))}."
    return ConfigError(f"{path} does not exist.\n  In {Path(path).parent}: {hint}")


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted. Raises ConfigError where it cannot be listed."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except PermissionError as error:
        raise unreadable(folder) from error


def unreadable(path: Path) -> ConfigError:
    """The error for a file or folder this user may not read."""
    return ConfigError(
        f"{path} cannot be read: permission denied.\n  Change its mode or its owner."
    )


def _glob(path: str, target: Path) -> Found:
    parts = target.parts
    first = next(i for i, part in enumerate(parts) if GLOB.search(part))
    root = Path(*parts[:first]) if first else Path()
    if not root.is_dir():
        raise missing(path)
    files = _matches(root, str(Path(*parts[first:])))
    if not files:
        raise ConfigError(f"{path} matches no file.\n  {root} holds {_some(names_in(root))}.")
    return Found(root.resolve().name, root, tuple(files))


def _folder(
    path: str,
    folder: Path,
    split: str | None,
    data_files: Sequence[str] | None,
    ds_type: str | None,
) -> Found:
    label = folder.resolve().name
    if data_files:
        named = [file for name in data_files for file in _data_file(path, folder, name)]
        return Found(label, folder, tuple(named))
    suffixes = KINDS.get(ds_type or "", SUFFIXES)
    names_in(folder)
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and file.suffix in suffixes
        and not any(NOT_DATA.fullmatch(part) for part in file.relative_to(folder).parts)
    ]
    if not files:
        raise ConfigError(
            f"{path} holds no file that ends in {', '.join(suffixes)}.\n"
            f"  It holds {_some(names_in(folder))}; name files with data_files and ds_type."
        )
    if any(_splits_in(file.relative_to(folder)) for file in files):
        wanted = split or "train"
        of_split = [file for file in files if wanted in _words(file.relative_to(folder))]
        if not of_split:
            raise ConfigError(
                f"{path} has no file for the split {wanted!r}; it has "
                f"{_some([file.relative_to(folder).as_posix() for file in files])}.\n"
                "  Set split, or name the files with data_files."
            )
        files = of_split
    return Found(label, folder, tuple(files))


def _data_file(path: str, folder: Path, name: str) -> list[Path]:
    """One entry of data_files: relative to the folder, or else to where the command runs."""
    for target in (folder / name, Path(name).expanduser()):
        if target.is_file():
            return [target]
        if target.is_dir():
            raise ConfigError(f"data_files: {name} is a folder.\n  Name its files.")
        if GLOB.search(name) and (files := _matches(folder, name)):
            return files
    near = difflib.get_close_matches(name, names_in(folder), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {_some(names_in(folder))}."
    raise ConfigError(f"data_files: {name} is not in {path}.\n  There: {hint}")


def _matches(root: Path, pattern: str) -> list[Path]:
    """Files that match, sorted; as in a shell, hidden ones are not meant."""
    return sorted(
        file for file in root.glob(pattern) if file.is_file() and not file.name.startswith(".")
    )


def _refuse_data_files(path: str, data_files: Sequence[str] | None) -> None:
    if data_files:
        raise ConfigError(
            f"{path} is a file, so data_files ({', '.join(data_files)}) has no folder to look in.\n"
            "  Write the folder as path, or leave data_files out."
        )


def _refuse_other_split(path: str, found: Found, split: str | None) -> None:
    """Files are one split, called train, unless their names call them otherwise."""
    if split in (None, "train"):
        return
    if not all(split in _words(Path(found.name_of(file))) for file in found.paths):
        raise ConfigError(
            f"split is {split!r}, but {path} is files that do not bear that name.\n"
            "  Name the files of the split, and leave split out."
        )


def _words(path: Path) -> set[str]:
    return {word for word in re.split(r"[^a-z]+", path.with_suffix("").as_posix().lower()) if word}


def _splits_in(path: Path) -> set[str]:
    return _words(path) & SPLIT_WORDS


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) or "nothing"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
