"""Hides from a Python program what only Linux has: as `sitecustomize` of the processes of a test.

Hidden is what Python can reach. C libraries still read `/proc`, and `sys.platform` stays.
"""

import os
import sys
from typing import Any

FOLDERS = ("/proc", "/sys", "/dev/shm")
SYMBOLS = ("prctl", "renameat2", "memfd_create", "fallocate")
CALLS = (
    *("copy_file_range", "eventfd", "memfd_create", "pidfd_open", "posix_fadvise"),
    *("posix_fallocate", "sched_getaffinity", "sched_setaffinity", "splice"),
    *("O_DIRECT", "O_TMPFILE"),
)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        if arguments[0].startswith(FOLDERS):
            raise FileNotFoundError(2, "hidden by the test", arguments[0])
    elif event in ("os.fork", "os.forkpty"):
        raise OSError(38, "hidden by the test")
    elif event == "ctypes.dlsym" and arguments[1] in SYMBOLS:
        raise AttributeError(f"{arguments[1]} is hidden by the test")


def hide() -> None:
    for name in CALLS:
        if hasattr(os, name):
            delattr(os, name)
    # An import fails, and find_spec finds nothing.
    sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]
    sys.addaudithook(refuse)
