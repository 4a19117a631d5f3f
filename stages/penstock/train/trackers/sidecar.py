"""What a process is that works beside training: the run goes first, and says when it has ended."""

import os
import signal
import threading

from penstock.train.trackers.tracker import Ending


class End:
    """The end of a run, as standard input tells of it."""

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.ending: Ending = "stopped"
        """Also if the rank died without a word."""

    def wait_for(self) -> None:
        """Read standard input to its end."""
        # Not through sys.stdin, whose lock a thread may not hold when the process ends.
        word = b""
        while more := os.read(0, 4096):
            word += more
        if word == b"finished":
            self.ending = "finished"
        self.has_come.set()


def work_beside(niceness: int) -> End:
    """Make this process one that training does not notice, and return the end to work until."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        # They reach everyone who works on a run; the rank finishes its step first, and then us.
        signal.signal(signum, signal.SIG_IGN)
    os.nice(niceness)
    end = End()
    threading.Thread(target=end.wait_for, daemon=True).start()
    return end
