"""Hides from a Python program what only Linux has: as `sitecustomize` of the processes of a test.

Hidden is what Python can reach. C libraries still read `/proc`, and `sys.platform` stays.
"""

import fcntl
import mmap
import multiprocessing.util
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

FOLDERS = ("/proc", "/sys", "/dev/shm")
SYMBOLS = ("prctl", "renameat2", "memfd_create", "fallocate", "gettid", "syscall", "sched_getcpu")
CALLS = {
    os: (
        *("copy_file_range", "eventfd", "fdatasync", "getrandom", "getxattr", "listxattr"),
        *("memfd_create", "pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate", "setns"),
        *("sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "setxattr", "splice"),
        *("timerfd_create", "unshare", "O_DIRECT", "O_NOATIME", "O_PATH", "O_TMPFILE"),
    ),
    fcntl: ("F_ADD_SEALS", "F_NOTIFY", "F_OFD_SETLK", "F_SETLEASE", "F_SETPIPE_SZ"),
    mmap: ("MAP_POPULATE", "MADV_DONTFORK", "MADV_HUGEPAGE"),
    resource: ("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_OFILE"),
    select: ("epoll",),
    signal: ("SIGPOLL", "SIGPWR", "SIGRTMAX", "SIGRTMIN", "sigtimedwait", "sigwaitinfo"),
    socket: (
        *("AF_NETLINK", "AF_PACKET", "AF_VSOCK", "SCM_CREDENTIALS", "SO_BINDTODEVICE"),
        *("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT"),
    ),
}


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        if arguments[0].startswith(FOLDERS):
            raise FileNotFoundError(2, "hidden by the test", arguments[0])
    elif event in ("os.fork", "os.forkpty"):
        raise OSError(38, "hidden by the test")
    elif event in ("socket.bind", "socket.connect"):
        address = arguments[1]
        if isinstance(address, str | bytes) and os.fsencode(address).startswith(b"\0"):
            raise OSError(22, "abstract sockets are hidden by the test")
    elif event == "ctypes.dlsym" and arguments[1] in SYMBOLS:
        raise AttributeError(f"{arguments[1]} is hidden by the test")


def hide() -> None:
    for module, names in CALLS.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    multiprocessing.util.abstract_sockets_supported = False
    # An import fails, and find_spec finds nothing.
    sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]
    sys.addaudithook(refuse)
