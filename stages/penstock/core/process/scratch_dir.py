"""Folders on this machine's own disk that are gone once their process is, however it ends.

A folder bears a lock that the kernel frees when its process dies. What a killed process leaves, the
next one that makes such a folder removes.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "penstock-"
YOUNG_SECONDS = 60.0
"""A folder is locked just after it is made: younger ones are left alone."""


@contextmanager
def scratch_folder(kind: str) -> Generator[Path]:
    """A new folder in the system's temporary one, that its owner alone may enter."""
    _remove_stale(kind)
    with tempfile.TemporaryDirectory(
        prefix=f"{PREFIX}{kind}-", ignore_cleanup_errors=True
    ) as folder:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield Path(folder)
        finally:
            os.close(handle)


def _remove_stale(kind: str) -> None:
    """Remove folders of this user and kind whose processes are dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{kind}-*"):
        with suppress(OSError):
            if _is_stale(folder):
                shutil.rmtree(folder)


def _is_stale(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_SECONDS:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError while it is in use
        return True
    finally:
        os.close(handle)
