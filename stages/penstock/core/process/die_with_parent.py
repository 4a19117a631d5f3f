"""No process of ours outlives the one it works for."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 1.0


def end_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for a SIGTERM when the parent dies; exit now if it is already dead.

    `parent` is the process id that started this one, where known: between its death and this call
    the process may have been handed to another parent.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if (os.getppid() != parent) if parent else (os.getppid() == 1):
        sys.exit(1)


def outlive_parent_by(seconds: float) -> None:
    """Exit that long after the parent's death, whatever this process waits for then.

    A request to end is heard between two steps only, and a step that waits for processes that died
    with the parent has no end.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-orphan", daemon=True).start()


def end_with_starter() -> None:
    """Exit as soon as the process that started this one through `multiprocessing` is dead.

    For processes that a fork server made: their parent is the server, which lives as long as they.
    """
    starter = multiprocessing.parent_process()
    if starter is None:
        return

    def watch() -> None:
        wait([starter.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
