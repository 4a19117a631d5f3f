"""Megatron-LM indexed datasets by name: `<prefix>.idx` and `<prefix>.bin`. Users specify the
prefix. The files are found here and read in `penstock.prepare.readers.megatron`."""

from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import ConfigError

KIND = "megatron"
INDEX, DATA = ".idx", ".bin"


def find_index(path: Path) -> Path | None:
    """The index file of `path`, which is a prefix or one of the two files; None if neither."""
    if path.suffix in (INDEX, DATA):
        path = path.with_suffix("")
    elif path.exists():
        return None
    index = path.with_name(path.name + INDEX)
    return index if index.is_file() else None


def add_data_files(files: Sequence[Path]) -> tuple[Path, ...]:
    """The files, with the .bin file after each index. Raises ConfigError if one is missing."""
    data_files: list[Path] = []
    for file in files:
        data_files.append(file)
        if file.suffix != INDEX:
            continue
        data = file.with_suffix(DATA)
        if not data.is_file():
            raise ConfigError(
                f"{file} is an index without its data: {data.name} is not beside it.\n"
                f"  Put both files into {file.parent}, or leave this one out."
            )
        data_files.append(data)
    return tuple(data_files)


def split_range(documents: int, splits: str, part: str) -> range:
    """The document range of a split, divided as in Megatron-LM. `splits` are the weights of train,
    validation and test, such as `980,10,10`; `part` is one of these names."""
    shares = parse_splits(splits)
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * documents))
    # The first split absorbs the rounding difference.
    excess = bounds[-1] - documents
    bounds = [0, *(bound - excess for bound in bounds[1:])]
    index = PARTS.index(part)
    return range(max(0, bounds[index]), max(0, bounds[index + 1]))


PARTS = ("train", "validation", "test")


def parse_splits(splits: str) -> tuple[float, float, float]:
    """Parse a text such as `980,10,10`; missing trailing numbers are 0. Raises ValueError for
    anything else."""
    try:
        # Megatron-LM's --split takes either separator.
        shares = [float(share) for share in splits.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(PARTS) or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ValueError(
            f"is {splits!r}; write the shares of train, validation and test, such as 980,10,10"
        )
    train, validation, test = (*shares, 0.0, 0.0)[: len(PARTS)]
    return train, validation, test
