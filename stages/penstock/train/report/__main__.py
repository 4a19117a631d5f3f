"""`python -m penstock.train.report SECONDS FOLDER`: keep the page of a run that goes on fresh.

The leading rank starts it, and ends its input at the end of the run; the last page is written by
whoever started the run. It works when nobody else does.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.core.store import reason_of
from penstock.train.report.page import write_report

NICENESS = 19
SHARE = 0.05
"""Of the time that may be spent on drawing, at most."""


def main(seconds: float, folder: Path) -> None:
    """Write now, and then every so many seconds, until standard input ends."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        # They reach everyone who works on a run; the rank finishes its step first, and then us.
        signal.signal(signum, signal.SIG_IGN)
    os.nice(NICENESS)
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    pause = 0.0
    while not ended.wait(pause):
        began = time.monotonic()
        try:
            write_report(folder, state="running")
        except (OSError, PenstockError) as error:
            # A disk that is full may have room again.
            sys.stderr.write(f"no report was written: {reason_of(error)}\n")
            sys.stderr.flush()
        pause = max(seconds, (time.monotonic() - began) / SHARE)


def _wait_for_end(ended: threading.Event) -> None:
    # Not through sys.stdin, whose lock a thread may not hold when the process ends.
    while os.read(0, 4096):
        pass
    ended.set()


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
