"""Lock files (flock), which the kernel releases when their holder dies.

Not every file system has them: NFS without its lock service, some file systems in user space
(fuse). A run is refused there before it starts: two writers of one folder would not see each other,
and a file that marks a folder as taken would outlive a killed holder.
"""

import errno
import fcntl
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from penstock.core.errors import StageError
from penstock.core.os_errors import describe_os_error

# What file systems without locks answer.
NO_LOCK_ERRNOS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

NO_LOCKS = "its file system has no locks (flock)"
REMEDY = "name a folder on a local disk, or mount the network file system with its lock service"


def acquire_lock(path: Path, timeout: float = -1) -> AbstractContextManager[object]:
    """Lock the file, which is created; the lock ends with the `with` block of what is returned.

    Raises filelock's Timeout if another process holds it for `timeout` seconds (never by default),
    StageError if it cannot be locked.
    """
    try:
        return FileLock(path).acquire(timeout=timeout)
    except Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        # Older versions of filelock raise NotImplementedError for ENOSYS.
        has_no_locks = not isinstance(error, OSError) or error.errno in NO_LOCK_ERRNOS
        reason = f"{NO_LOCKS}; {REMEDY}" if has_no_locks else describe_os_error(error)
        raise StageError(f"{path.parent} cannot be locked: {reason}.") from error


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock; a file that may only be read is enough to tell."""
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # Held, or on NFS, which locks only what is open for writing.
        return True
    return False


def refusal_to_write(folder: Path) -> str | None:
    """Why no files can be written and locked in `folder`, which may not exist yet; None if they
    can. Creates and removes a uniquely named folder in it, or in its nearest existing parent."""
    # mkdir(2) fails at a link that leads nowhere, for which `exists` is False.
    existing = next(
        parent for parent in (folder, *folder.parents) if parent.exists() or parent.is_symlink()
    )
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        # By writing: file modes are not reliable on all file systems.
        with tempfile.TemporaryDirectory(prefix=".penstock-", dir=existing) as probe:
            path = Path(probe, "lock")
            with path.open("wb") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    has_no_locks = error.errno in NO_LOCK_ERRNOS
                    reason = NO_LOCKS if has_no_locks else describe_os_error(error, path)
                    return f"{reason}; {REMEDY}"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return reason if existing == folder else f"nothing can be made in {existing} ({reason})"
    return None
