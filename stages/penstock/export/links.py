"""Symbolic links in a run folder to its latest export.

A note of every link is stored beside the export in `.links/<key>/`, so that an export with links
from run folders, wherever they are, is not pruned.
"""

import logging
import os
from pathlib import Path

from penstock.config.schema.run import RunConfig
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short
from penstock.core.cache.store import StageResult
from penstock.core.errors import DamagedFileError, StageError
from penstock.core.files import PART, read_json, remove, write_json
from penstock.core.os_errors import describe_os_error
from penstock.core.remote.local_mirror import local_cache_dir

log = logging.getLogger("penstock.export")

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
        if target.is_dir():
            link_text = str(link.absolute())
            note = _links_folder(outcome.path) / f"{short(digest_json(link_text))}.json"
            if not note.is_file():
                # Runs that end at the same time write the same note: each renames its own file.
                own_note = note.with_name(f"{note.name}.{os.getpid()}")
                write_json(own_note, {"link": os.path.relpath(link_text, outcome.path.resolve())})
                own_note.replace(note)
            _point(link, target)
        elif link.is_symlink():
            link.unlink()


def _point(link: Path, target: Path) -> None:
    # A relative link still holds when the tree of runs and artifacts is moved or copied as a whole.
    # A link is relative to the folder that it is really in.
    relative = os.path.relpath(target.resolve(), link.parent.resolve())
    if link.is_symlink() and str(link.readlink()) == relative:
        return
    new = link.with_name(f".{link.name}{PART}")
    try:
        remove(new)
        new.symlink_to(relative)
        new.replace(link)
    except OSError as error:
        log.warning(
            "%s cannot be linked (%s); the exported model is in %s",
            *(link, describe_os_error(error), target),
        )


def find_links(export: Path) -> list[Path]:
    """The links of runs that currently point at the export in `export`, sorted."""
    links: set[Path] = set()
    for note in _links_folder(export).glob("*.json"):
        try:
            link = Path(os.path.normpath(export.resolve() / read_json(note)["link"]))
        except (OSError, DamagedFileError, KeyError, TypeError):
            continue
        if link.is_symlink() and link.resolve().parent == export.resolve():
            links.add(link)
    return sorted(links)


def forget_links(export: Path) -> None:
    """Delete the notes about a deleted export."""
    remove(_links_folder(export))


def _links_folder(export: Path) -> Path:
    return export.parent / LINKS_FOLDER / export.name
