"""Messages of OSError and MemoryError: disk full, read-only file system, too many open files."""

import errno
import re
import shutil
from contextlib import suppress
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

# Messages of writers that hide the errno: safetensors and Arrow, NumPy, torch.
_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|os error (28|122)\b"
    r"|\d+ requested and \d+ written"
    r"|enforce fail at inline_container\.cc|PytorchStreamWriter failed writing file"
)


def describe_os_error(error: BaseException, folder: Path | None = None) -> str:
    """One sentence for an exception that was not written for users. `folder` is the folder being
    written to, for errors that do not contain a path."""
    if is_full_disk(error):
        path = error.filename if isinstance(error, OSError) else None
        suffix = f" ({path or folder})" if path or folder else ""
        quota = isinstance(error, OSError) and error.errno == errno.EDQUOT
        reason = "the quota of this user is used up" if quota else "the disk is full"
        free = _free_space(Path(str(path)).parent if path else folder)
        return f"{reason}{suffix}; free some space{free}"
    if isinstance(error, MemoryError):
        return "the memory of this machine is used up; use fewer processes (data.dataset_num_proc)"
    if not isinstance(error, OSError) or not error.strerror:
        return f"{type(error).__name__}: {error}"
    path = error.filename or folder
    suffix = f" ({path})" if path else ""
    match error.errno:
        case errno.EROFS:
            return f"the file system is read-only{suffix}; name a folder that can be written to"
        case errno.EMFILE | errno.ENFILE:
            return (
                f"too many files are open{suffix}; raise the limit (ulimit -n), or use fewer "
                "workers"
            )
        case errno.EIO:
            return f"the disk or the network file system failed: input/output error{suffix}"
        case _:
            return f"{error.strerror.lower()}{suffix}"


def is_full_disk(error: BaseException) -> bool:
    """Whether the error or one of its causes is a full disk or an exceeded quota."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return True
        if _NO_ROOM.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the operating system refused something, or memory ran out."""
    if isinstance(error, MemoryError) or is_full_disk(error):
        return True
    return isinstance(error, OSError) and error.errno is not None


def _free_space(folder: Path | None) -> str:
    while folder is not None and folder != folder.parent:
        with suppress(OSError):
            return f" ({shutil.disk_usage(folder).free / 1e6:.1f} MB are left there)"
        folder = folder.parent
    return ""
