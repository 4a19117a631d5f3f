"""Whether a folder can be written to, found out by writing: modes do not tell it everywhere."""

import tempfile
from pathlib import Path


def refusal_to_write(folder: Path) -> str | None:
    """Why nothing can be put into `folder`, which need not be there yet; None if something can.

    A folder with a name of its own is made in it, or in the nearest one above it that is there,
    and removed again.
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
