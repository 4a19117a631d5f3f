"""Replace a folder by another one, so that a whole one is found after a kill at any moment."""

import ctypes
import errno
import os
from pathlib import Path

from penstock.core.files import fsync, remove

AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""Flag of renameat2(2), from linux/fs.h."""
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of renameat2 of a kernel, file system or sandbox without RENAME_EXCHANGE."""


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


def restore_replaced(root: Path, suffix: str) -> None:
    """Rename the folders `<name><suffix>` in `root` to `<name>`, where that does not exist.

    That is the state after a kill within `replace_folder`.
    """
    for aside in root.glob(f"*{suffix}") if root.is_dir() else ():
        target = aside.with_name(aside.name.removesuffix(suffix))
        if not target.exists():
            aside.rename(target)
            fsync(root)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two existing paths in one step. False if this is not supported.

    Raises OSError.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux, or glibc before 2.28
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
