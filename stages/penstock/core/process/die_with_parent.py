"""Child processes die with their parent."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from penstock.core.machine.linux import signal_on_parent_death

POLL_SECONDS = 1.0


def end_with_parent(parent: int | None = None) -> None:
    """Get SIGTERM when the parent dies; exit now if it is already dead.

    `parent` is the id of the parent process, where known. If the parent dies before this call, the
    process has already been reparented.
    """
    if not signal_on_parent_death(signal.SIGTERM):
        _on_parent_death(lambda: os.kill(os.getpid(), signal.SIGTERM))
    # After the request: the kernel sends no signal for a parent that is dead by then.
    if (os.getppid() != parent) if parent else (os.getppid() == 1):
        sys.exit(1)


def outlive_parent_by(seconds: float) -> None:
    """Exit that many seconds after the parent's death, whatever this process is waiting for.

    A signal is only handled between two steps, and a step that waits for processes that died with
    the parent never ends.
    """

    def end() -> None:
        time.sleep(seconds)
        # sys.exit raises SystemExit, which in a thread ends that thread alone.
        os._exit(1)

    _on_parent_death(end)


def _on_parent_death(act: Callable[[], None]) -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        act()

    threading.Thread(target=watch, name="penstock-orphan", daemon=True).start()


def end_with_starter() -> None:
    """Exit as soon as the process that started this one through `multiprocessing` dies.

    For processes created by a fork server: their parent is the fork server, which lives as long as
    they do.
    """
    starter = multiprocessing.parent_process()
    if starter is None:
        return

    def watch() -> None:
        wait([starter.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
