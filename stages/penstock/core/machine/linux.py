"""What only Linux has, and what takes its place elsewhere.

No other module reads `/proc` or calls what only the Linux kernel or its C library has
(`tests/test_layout.py`). Without it a run has the same results.
"""

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

PROC = Path("/proc")

PR_SET_PDEATHSIG = 1
SIOCGIFADDR = 0x8915
AT_FDCWD = -100
RENAME_EXCHANGE = 2  # Flag of renameat2(2), from linux/fs.h
# Errors of a system call that this kernel, file system or sandbox does not have.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def proc_lines(name: str) -> list[str]:
    """The lines of a file of `/proc`; none where it cannot be read."""
    try:
        return (PROC / name).read_text().splitlines()
    except OSError:
        return []


def proc_fields(name: str) -> dict[str, str]:
    """The lines `field: value` of a file of `/proc`, the first of each field."""
    # Reversed, because a dict keeps the last of equal names: cpuinfo repeats them for every CPU.
    pairs = [line.partition(":") for line in reversed(proc_lines(name))]
    return {field.strip(): " ".join(value.split()) for field, _, value in pairs}


@cache
def file_system_type(device: int) -> str:
    """The type of the mounted file system with this `st_dev` (ext4, nfs4, fuse.sshfs, …), or ""
    if unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for fields in map(str.split, proc_lines("self/mountinfo")):
        # proc(5): the type follows a lone hyphen, after optional fields.
        if fields[2] == number and "-" in fields[6:-1]:
            return fields[fields.index("-", 6) + 1]
    return ""


def num_cpus() -> int:
    """Number of CPUs that this process may use; elsewhere, all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The model of this machine's CPU, or its architecture."""
    return proc_fields("cpuinfo").get("model name") or platform.processor() or platform.machine()


def memory_bytes() -> float | None:
    """Memory of this machine in bytes; None if unknown."""
    if total := proc_fields("meminfo").get("MemTotal"):
        # The `kB` of /proc are 1024 bytes.
        return float(total.split()[0]) * 1024
    with suppress(ValueError, OSError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def peak_memory_bytes() -> int:
    """Peak resident memory of this process in bytes."""
    # VmHWM covers only this program: getrusage includes the process that started it.
    if peak := proc_fields("self/status").get("VmHWM"):
        return int(peak.split()[0]) * 1024
    import resource  # noqa: PLC0415 - of Unix

    # getrusage(2): ru_maxrss is in bytes on macOS, in units of 1024 bytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_start() -> float | None:
    """Start time of this process in seconds since the epoch; None if unknown."""
    with suppress(OSError, ValueError, IndexError):
        # The process name, in parentheses, may contain spaces; field 20 after it counts from boot.
        ticks = int((PROC / "self/stat").read_text().rpartition(")")[2].split()[19])
        up = float((PROC / "uptime").read_text().split()[0])
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    return None


def child_processes(parent: int) -> Iterator[int]:
    """The running processes that the process `parent` has started."""
    states: list[list[str]] = []
    files = list(PROC.glob("[0-9]*/stat"))
    for file in files:
        with suppress(OSError):
            # The name, in parentheses, may contain anything; state and parent follow it.
            state, of = file.read_text().rpartition(")")[2].split()[:2]
            states.append([file.parent.name, of, state])
    if not files:
        states = [line.split() for line in _ps("-A", "-o", "pid=,ppid=,state=").splitlines()]
    for pid, of, state in states:
        if int(of) == parent and not state.startswith("Z"):
            yield int(pid)


def command_line(pid: int) -> list[str]:
    """The words of a process's command; none if there is no such process."""
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return _ps("-p", str(pid), "-o", "command=").split()


def _ps(*arguments: str) -> str:
    with suppress(OSError):
        done = subprocess.run(["ps", *arguments], capture_output=True, text=True, check=False)
        return done.stdout
    return ""


def signal_on_parent_death(number: int) -> bool:
    """Have the kernel send this process a signal when its parent dies; False if it cannot."""
    with suppress(AttributeError, OSError):
        # prctl(2): the parent is the thread that forked, so a starter must fork from a lasting
        # thread.
        return ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number) == 0
    return False


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two existing paths in one step. False if this is not supported. Raises
    OSError."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # not Linux, or glibc before 2.28
        return False
    names = os.fsencode(first), os.fsencode(second)
    if rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def allocate(descriptor: int, size: int) -> None:
    """Give an empty file that size, with its blocks where the file system can reserve them. Raises
    OSError, for a full disk where blocks are reserved."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def copy_file_range(old: int, new: int, count: int, source: int, target: int) -> int | None:
    """Number of bytes that the kernel copied from the file `old` at `source` to `new` at `target`.
    None if it cannot copy between these two files. Raises OSError."""
    try:
        return os.copy_file_range(old, new, count, source, target)
    except AttributeError:
        return None
    except OSError as error:
        # EXDEV: two file systems before Linux 5.3, two types of file systems since 5.19.
        if error.errno in (*UNSUPPORTED, errno.EXDEV):
            return None
        raise


def interface_of(address: str, probe: socket.socket) -> str | None:
    """The network interface that has this IPv4 address; None if unknown."""
    for _, name in socket.if_nameindex() if sys.platform.startswith("linux") else ():
        with suppress(OSError):  # The interface has no address.
            # netdevice(7): ifreq is a name of 16 bytes, then a sockaddr_in: family, port, address.
            request = struct.pack("256s", name.encode()[:15])
            if socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]) == address:
                return name
    return None
