"""Temporary directories that are removed once their process ends, however it ends.

A directory has a lock that the kernel releases when its process dies. Directories of killed
processes are removed by the next process that creates such a directory.
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
# Directories younger than this are not removed: a directory is locked just after it is created.
MIN_AGE_SECONDS = 60.0


@contextmanager
def scratch_folder(kind: str) -> Generator[Path]:
    """Create a directory in the system's temporary directory, accessible only by its owner."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}{kind}-*"):
        with suppress(OSError):
            if _is_stale(left):
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(
        prefix=f"{PREFIX}{kind}-", ignore_cleanup_errors=True
    ) as folder:
        handle = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # Without locks, as on some network shares, none is stale.
                fcntl.flock(handle, fcntl.LOCK_SH)
            yield Path(folder)
        finally:
            os.close(handle)


def _is_stale(folder: Path) -> bool:
    # Every user can write to the system's folder: a link that somebody put there is not followed.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < MIN_AGE_SECONDS:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError if the directory is in use.
        return True
    finally:
        os.close(handle)
