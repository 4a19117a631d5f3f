"""Write permission check, by writing: file modes are not reliable on all file systems."""

import tempfile
from pathlib import Path


def refusal_to_write(folder: Path) -> str | None:
    """Why `folder`, which may not exist yet, is not writable; None if it is writable.

    Creates and removes a uniquely named folder in it, or in its nearest existing parent.
    """
    there = next(each for each in (folder, *folder.parents) if each.exists() or each.is_symlink())
    if not there.is_dir():
        return f"{there} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".penstock-", dir=there):
            return None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return reason if there == folder else f"nothing can be made in {there} ({reason})"
