"""Symbolic links in a run folder to its latest export.

A note of every link is stored beside the export in `.links/<key>/`, so that an export with links
from run folders, wherever they are, is not pruned.
"""

from collections.abc import Iterator
from pathlib import Path

from penstock.config.schema.run import RunConfig
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short
from penstock.core.cache.store import StageResult
from penstock.core.errors import DamagedFileError, StageError
from penstock.core.files import read_json, remove, write_json
from penstock.core.remote.local_mirror import local_cache_dir

NAMES = ("hf", "adapter")

LINKS_FOLDER = ".links"


def link_exported(outcome: StageResult, run: RunConfig) -> None:
    """Point `<output_dir>/hf` (and `adapter`) at the latest export."""
    for name in NAMES:
        link = local_cache_dir(run.train.output_dir) / name
        target = outcome.path / name
        if link.exists() and not link.is_symlink():
            raise StageError(
                f"{link} exists and is not a symbolic link.\n  Move it elsewhere and run again."
            )
        wanted = target.resolve() if target.is_dir() else None
        if link.is_symlink() and (wanted is None or link.resolve() != wanted):
            link.unlink()
        if wanted:
            _record_link(outcome.path, link.absolute())
            if not link.is_symlink():
                link.symlink_to(wanted)


def find_links(export: Path) -> list[Path]:
    """The links of runs that currently point at the export in `export`, sorted."""
    return sorted({link for link in _read_links(export) if _points_to(link, export)})


def forget_links(export: Path) -> None:
    """Delete the notes about a deleted export."""
    remove(_links_folder(export))


def _record_link(export: Path, link: Path) -> None:
    note = _links_folder(export) / f"{short(digest_json(str(link)))}.json"
    if not note.is_file():
        write_json(note, {"link": str(link)})


def _read_links(export: Path) -> Iterator[Path]:
    for note in _links_folder(export).glob("*.json"):
        try:
            yield Path(read_json(note)["link"])
        except (OSError, DamagedFileError, KeyError, TypeError):
            continue


def _points_to(link: Path, export: Path) -> bool:
    return link.is_symlink() and link.resolve().parent == export.resolve()


def _links_folder(export: Path) -> Path:
    return export.parent / LINKS_FOLDER / export.name
