"""Write permission check, by writing: file modes are not reliable on all file systems."""

import tempfile
from pathlib import Path

from penstock.core.file_lock import refusal_to_lock


def refusal_to_write(folder: Path) -> str | None:
    """Why no files can be written and locked in `folder`, which may not exist yet; None if they
    can.

    Creates and removes a uniquely named folder in it, or in its nearest existing parent.
    """
    existing = next(
        parent for parent in (folder, *folder.parents) if parent.exists() or parent.is_symlink()
    )
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".penstock-", dir=existing) as probe:
            return refusal_to_lock(Path(probe, "lock"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return reason if existing == folder else f"nothing can be made in {existing} ({reason})"
