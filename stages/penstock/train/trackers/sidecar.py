"""Sidecar process: runs at low priority beside training, until the rank closes its standard
input."""

import os
import signal
import threading

from penstock.train.trackers.tracker import Ending


class End:
    """The end of the run, as read from standard input."""

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.ending: Ending = "stopped"
        """Also if the rank died without a message."""

    def wait_for(self) -> None:
        """Read standard input to its end."""
        # Not through sys.stdin, whose lock must not be held by a thread at interpreter exit.
        word = b""
        while more := os.read(0, 4096):
            word += more
        if word == b"finished":
            self.ending = "finished"
        self.has_come.set()


def work_beside(niceness: int) -> End:
    """Lower this process's priority; return the End to wait for."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        # Signals reach the whole process group; the rank finishes its step first and then ends us.
        signal.signal(signum, signal.SIG_IGN)
    os.nice(niceness)
    end = End()
    threading.Thread(target=end.wait_for, daemon=True).start()
    return end
