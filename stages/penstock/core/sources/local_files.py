"""Resolve a local path, folder or glob to data files. Reads no records. Every error is a
ConfigError with the path as the user typed it."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from penstock.core.errors import ConfigError, ElsewhereError
from penstock.core.sources import megatron_files
from penstock.core.sources.datasets_folder import read_saved_folder, saved_files

KINDS: dict[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt",),
    "tar": (".tar",),
    megatron_files.KIND: (megatron_files.INDEX,),
}
"""Values of `ds_type` and the file suffixes that imply them."""

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
"""Compression by file suffix."""

# Kinds that need random access, so files must not be compressed.
RANDOM_ACCESS_KINDS = ("parquet", "arrow", megatron_files.KIND)

UNSUPPORTED_SUFFIXES = {
    ".xlsx": "a spreadsheet, which is not read.\n  Save the table as CSV.",
    ".xls": "a spreadsheet, which is not read.\n  Save the table as CSV.",
    ".zip": "an archive, which is not read.\n  Unpack it, and name its folder.",
    ".tgz": "an archive, which is not read.\n  Rename it to .tar.gz, if it is a WebDataset.",
    ".pdf": "a document, which is not read.\n  Save its text as .txt or as lines of JSON.",
    ".docx": "a document, which is not read.\n  Save its text as .txt or as lines of JSON.",
    ".pkl": "pickled, which is not read: that can run code.\n  Save the records as lines of JSON.",
    ".pt": "pickled, which is not read: that can run code.\n  Save the records as lines of JSON.",
}
"""Suffixes of unsupported data formats, with the recommended action."""

NOT_DATA = re.compile(
    r"[._].*|readme.*|licen[cs]e.*|state\.json|dataset_(info|infos|dict)\.json", re.IGNORECASE
)
"""Files in data folders that are not data: hidden files, notices, metadata of `datasets`."""

SUFFIXES = tuple(
    suffix + compression
    for kind, suffixes in KINDS.items()
    for suffix in suffixes
    for compression in ("", *(() if kind in RANDOM_ACCESS_KINDS else COMPRESSED))
)
"""All suffixes that identify a file's kind."""

# Suffixes of images, which are data only with texts.
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")

SPLIT_WORDS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class LocalFiles:
    """Files in reading order, named relative to `root`; `label` is the name shown to users."""

    label: str
    root: Path
    paths: tuple[Path, ...]

    def name_of(self, path: Path) -> str:
        """The file's name in a pin: relative to the root if it is below it, else its base name."""
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        return path.name


def detect_compression(name: str) -> str | None:
    """The compression of the file called `name`, or None."""
    return COMPRESSED.get(Path(name).suffix.lower())


def detect_file_kind(name: str) -> str | None:
    """The kind implied by a file name without its compression suffix, or None."""
    if not name.lower().endswith(SUFFIXES):
        return None
    stem = name[: -len(Path(name).suffix)] if detect_compression(name) else name
    suffix = Path(stem).suffix.lower()
    return next((kind for kind, suffixes in KINDS.items() if suffix in suffixes), None)


def looks_local(path: str) -> bool:
    """Whether a missing path was meant as a local file, judged by its form and similar
    local files."""
    return (
        path.startswith((".", "/", "~"))
        or path.lower().endswith(SUFFIXES)
        or bool(GLOB.search(path))
        or path.count("/") > 1
        or ("/" in path and Path(path).parent.exists())
    )


def resembles_local_file(name: str) -> bool:
    """Whether a missing bare name is similar to a file in the current folder, and so is more likely
    a typo than a Hub repository."""
    return bool(difflib.get_close_matches(name, list_names(Path()), n=1, cutoff=0.8))


def find_data(
    path: str, *, split: str | None, data_files: Sequence[str] | None, ds_type: str | None
) -> LocalFiles:
    """Find the data files of `path`: a file, a glob, or a folder (all of it, or its `data_files`).

    If file names in a folder contain split names, returns the files of `split`, or of `train`.
    Raises ConfigError if there is no file, or none of the requested kind.
    """
    check_split(path, split)
    target = Path(path).expanduser()
    index = megatron_files.find_index(target) if ds_type in (None, megatron_files.KIND) else None
    if target.is_dir() and not data_files and (saved := read_saved_folder(target)):
        if ds_type not in (None, "arrow"):
            raise ConfigError(
                f"{path} was written by save_to_disk, which writes arrow, and ds_type is {ds_type}."
                "\n  Leave ds_type out."
            )
        files = saved_files(saved.select_split(path, split), path)
        return LocalFiles(target.resolve().name, target, files)
    if index:
        reject_data_files(path, data_files)
        index_files = LocalFiles(index.stem, index.parent, (index,))
    elif GLOB.search(path) and not target.exists():
        index_files = _glob(path, target)
    elif target.is_dir():
        index_files = _folder(path, target, split, data_files, ds_type)
    elif target.exists():
        reject_data_files(path, data_files)
        index_files = LocalFiles(target.name, target.parent, (target,))
    else:
        raise missing_path_error(path)
    for file in index_files.paths:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder, not a file.\n  Name its files.")
        if not file.is_file():
            raise ConfigError(f"{file} is a device or a pipe, not a file.\n  Name a file.")
        check_kind(index_files.name_of(file), ds_type, path)
    reject_other_split(path, [index_files.name_of(file) for file in index_files.paths], split)
    return replace(index_files, paths=megatron_files.add_data_files(index_files.paths))


def check_split(path: str, split: str | None) -> None:
    """Reject `split` for a single file: files have splits only by name."""
    if split and not re.fullmatch(r"\w+", split):
        raise ConfigError(
            f"split is {split!r}, but slices of a split are not supported for files ({path}).\n"
            "  Write a path with only the wanted files, and leave split out."
        )


def check_kind(name: str, ds_type: str | None, path: str) -> None:
    """Reject a file of unknown kind, and a compressed file of a kind that must not be
    compressed."""
    kind = ds_type or detect_file_kind(name)
    called = name if name == path else f"{name} (of {path})"
    if kind is None:
        format_name = UNSUPPORTED_SUFFIXES.get(Path(name).suffix.lower())
        raise ConfigError(
            f"{called} is {format_name}"
            if format_name
            else f"{called} has no suffix of a known file type.\n"
            f"  Write ds_type: one of {', '.join(KINDS)}."
        )
    if kind in RANDOM_ACCESS_KINDS and detect_compression(name):
        raise ConfigError(
            f"{called} is a compressed {kind} file, which does not allow random access.\n"
            f"  Decompress it; {kind} files are compressed internally."
        )


def missing_path_error(path: str) -> ConfigError:
    """The error for a local path that is missing, with similar names, or out of reach."""
    target = Path(path).expanduser()
    parent = target.parent
    try:
        # From Python 3.14, `Path.exists` is False wherever the system refuses to say.
        target.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except PermissionError:
        return permission_error(target)
    except OSError as error:
        return ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.")
    if not parent.is_dir():
        return ElsewhereError(
            f"{path} does not exist, and neither does the folder {Path(path).parent}.\n"
            f"  Paths are relative to the folder the command runs in ({Path.cwd().name}/)."
        )
    if target.is_symlink():
        return ConfigError(
            f"{path} is a link to {target.readlink()}, which does not exist.\n  Name a file."
        )
    names = list_names(parent)
    hint = hint_at(target.name, names, f"it holds {abbreviate(names)}.")
    return ConfigError(f"{path} does not exist.\n  In {Path(path).parent}: {hint}")


def hint_at(name: str, names: Sequence[str], otherwise: str) -> str:
    """The `names` that `name` may be a misspelling of; `otherwise` if none is similar."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def list_names(folder: Path) -> list[str]:
    """The names in a folder, sorted. Raises ConfigError if it cannot be listed."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except PermissionError as error:
        raise permission_error(folder) from error


def permission_error(path: Path) -> ConfigError:
    """The error for a file or folder without read permission."""
    return ConfigError(
        f"{path} cannot be read: permission denied.\n  Change its mode or its owner."
    )


def _glob(path: str, target: Path) -> LocalFiles:
    parts = target.parts
    first = next(i for i, part in enumerate(parts) if GLOB.search(part))
    root = Path(*parts[:first]) if first else Path()
    if not root.is_dir():
        raise missing_path_error(path)
    files = _matches(root, str(Path(*parts[first:])))
    if not files:
        raise ConfigError(
            f"{path} matches no file.\n  {root} holds {abbreviate(list_names(root))}."
        )
    return LocalFiles(root.resolve().name, root, tuple(files))


def _folder(
    path: str,
    folder: Path,
    split: str | None,
    data_files: Sequence[str] | None,
    ds_type: str | None,
) -> LocalFiles:
    label = folder.resolve().name
    if data_files:
        named = [file for name in data_files for file in _data_file(path, folder, name)]
        return LocalFiles(label, folder, tuple(named))
    # For its error: rglob takes a folder that may not be listed for an empty one.
    list_names(folder)
    below = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    names = select_data_files(path, below, split=split, ds_type=ds_type)
    return LocalFiles(label, folder, tuple(folder / name for name in names))


def select_data_files(
    path: str, names: Sequence[str], *, split: str | None, ds_type: str | None
) -> list[str]:
    """Choose the data files among the files below the folder `path`, sorted.

    If file names contain split names, chooses the files of `split`, or of `train`, or of the only
    split. Raises ConfigError if none is left.
    """
    data = [
        name
        # By parts, as Path objects sort: in plain text, `a-b/x` would come before `a/x`.
        for name in sorted(names, key=lambda name: PurePosixPath(name).parts)
        if (kind := detect_file_kind(name))
        # Other formats also use .idx files, so .idx alone does not make a Megatron dataset.
        and ds_type in ((kind,) if kind == megatron_files.KIND else (None, kind))
        and not any(NOT_DATA.fullmatch(part) for part in PurePosixPath(name).parts)
    ]
    # Beside other data, archives hold its images.
    tables = [name for name in data if detect_file_kind(name) != "tar"]
    data = data if ds_type else tables or data
    if not data:
        has_images = any(name.lower().endswith(IMAGES) for name in names)
        hint = (
            "write a metadata.jsonl beside the images, with file_name and the text of each"
            if has_images
            else "set data_files and ds_type"
        )
        of_kind = KINDS.items() if ds_type is None else [(ds_type, KINDS.get(ds_type, ()))]
        suffixes = ", ".join(suffix for _, of in of_kind for suffix in of)
        raise ConfigError(
            f"{path} holds no file that ends in {suffixes}.\n"
            f"  It holds {abbreviate(top_level_names(names))}; {hint}."
        )
    splits = {frozenset(_words(Path(name)) & SPLIT_WORDS) for name in data}
    if splits == {frozenset()} or (split is None and len(splits) == 1):
        return data
    split_name = split or "train"
    of_split = [name for name in data if split_name in _words(Path(name))]
    if not of_split:
        raise ConfigError(
            f"{path} has no file for the split {split_name!r}; it has {abbreviate(data)}.\n"
            "  Set split, or name the files with data_files."
        )
    return of_split


def top_level_names(names: Sequence[str]) -> list[str]:
    """The names directly in the folder that contains `names`, sorted."""
    return sorted({PurePosixPath(name).parts[0] for name in names})


def _data_file(path: str, folder: Path, name: str) -> list[Path]:
    """Resolve one entry of data_files: relative to the folder, or else to the working directory."""
    for target in (folder / name, Path(name).expanduser()):
        if target.is_file():
            return [target]
        if target.is_dir():
            raise ConfigError(f"data_files: {name} is a folder.\n  Name its files.")
        if GLOB.search(name) and (files := _matches(folder, name)):
            return files
    names = list_names(folder)
    hint = hint_at(name, names, f"it has {abbreviate(names)}.")
    raise ConfigError(f"data_files: {name} is not in {path}.\n  There: {hint}")


def _matches(root: Path, pattern: str) -> list[Path]:
    """Files that match, sorted. As in a shell, hidden files do not match."""
    return sorted(
        file for file in root.glob(pattern) if file.is_file() and not file.name.startswith(".")
    )


def reject_data_files(path: str, data_files: Sequence[str] | None) -> None:
    """Reject `data_files` for a single file: they are names in a folder."""
    if data_files:
        raise ConfigError(
            f"{path} is a file, so data_files ({', '.join(data_files)}) has no folder to look in.\n"
            "  Write the folder as path, or leave data_files out."
        )


def reject_other_split(path: str, names: Sequence[str], split: str | None) -> None:
    """Reject other splits of files whose names contain no split: they are the split `train`."""
    if split in (None, "train"):
        return
    if not all(split in _words(Path(name)) for name in names):
        raise ConfigError(
            f"split is {split!r}, but {path} is files whose names do not contain that split.\n"
            "  Name the files of the split, and leave split out."
        )


def _words(path: Path) -> set[str]:
    return {part for part in re.split(r"[^a-z]+", path.with_suffix("").as_posix().lower()) if part}


def abbreviate(names: Sequence[str]) -> str:
    """The first few names, and the number of remaining ones."""
    shown = ", ".join(names[:8]) or "nothing"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
