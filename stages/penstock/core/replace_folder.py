"""Replace or delete a folder, so that a whole one or none is found after a kill at any moment."""

from pathlib import Path

from penstock.core.files import fsync, remove
from penstock.core.machine.linux import exchange

DELETED = ".deleted"  # Suffix of a folder that is being deleted


def replace_folder(new: Path, target: Path, aside: Path) -> Path | None:
    """Rename the folder `new` to `target`; return where the old folder is now, for its deletion.

    Linux exchanges the two in one step, after which `new` is the old one. Elsewhere the old one is
    moved to `aside`; `restore_replaced` puts it back after a kill between the two renames. None if
    `target` did not exist. Raises OSError.
    """
    old = new if target.exists() else None
    if old and not exchange(new, target):
        old = aside
        remove(aside)
        target.rename(aside)
    if old is not new:
        new.rename(target)
    fsync(target.parent)
    return old


def rename_folder(new: Path, target: Path) -> None:
    """Rename the folder `new` to `target`, which is empty or does not exist. Raises OSError."""
    if target.exists():
        target.rmdir()
    fsync(new)
    new.rename(target)
    fsync(target.parent)


def delete_folder(folder: Path) -> None:
    """Delete the folder, if it exists. Renamed first: after a kill, no part of it is found under
    its name; `finish_deletions` deletes the rest."""
    aside = folder.with_name(f".{folder.name}{DELETED}")
    remove(aside)
    if folder.exists():
        folder.rename(aside)
        remove(aside)


def finish_deletions(root: Path) -> None:
    """Delete what a killed `delete_folder` left in `root`."""
    for aside in root.glob(f".*{DELETED}"):
        remove(aside)


def restore_replaced(root: Path, suffix: str) -> None:
    """Rename the folders `<name><suffix>` in `root` to `<name>`, where that does not exist. That is
    the state after a kill within `replace_folder`."""
    for aside in root.glob(f"*{suffix}") if root.is_dir() else ():
        target = aside.with_name(aside.name.removesuffix(suffix))
        if not target.exists():
            aside.rename(target)
            fsync(root)
