"""Sidecar process: runs at low priority beside training, until the rank closes its standard
input."""

import os
import signal
import threading

from penstock.train.trackers.tracker import Ending


class RunEnd:
    """The end of the run, as read from standard input."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.ending: Ending = "stopped"
        """Also if the rank died without a message."""

    def read_stdin(self) -> None:
        # Not through sys.stdin, whose lock must not be held by a thread at interpreter exit.
        message = b""
        while more := os.read(0, 4096):
            message += more
        if message == b"finished":
            self.ending = "finished"
        self.event.set()


def start_sidecar(niceness: int) -> RunEnd:
    """Lower this process's priority; return the RunEnd to wait for."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        # Signals reach the whole process group; the rank finishes its step first and then ends us.
        signal.signal(signum, signal.SIG_IGN)
    os.nice(niceness)
    end = RunEnd()
    threading.Thread(target=end.read_stdin, daemon=True).start()
    return end
