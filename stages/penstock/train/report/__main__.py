"""`python -m penstock.train.report SECONDS FOLDER`: keep the page of a run that goes on fresh.

The leading rank starts it, and ends its input at the end of the run; the last page is written by
whoever started the run. It works when nobody else does.
"""

import sys
import time
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.core.os_errors import describe_os_error
from penstock.train.report.page import write_report
from penstock.train.trackers.sidecar import work_beside

NICENESS = 19
SHARE = 0.05
"""Of the time that may be spent on drawing, at most."""


def main(seconds: float, folder: Path) -> None:
    """Write now, and then every so many seconds, until standard input ends."""
    end = work_beside(NICENESS)
    pause = 0.0
    while not end.has_come.wait(pause):
        began = time.monotonic()
        try:
            write_report(folder, state="running")
        except (OSError, PenstockError) as error:
            # A disk that is full may have room again.
            sys.stderr.write(f"no report was written: {describe_os_error(error)}\n")
            sys.stderr.flush()
        pause = max(seconds, (time.monotonic() - began) / SHARE)


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
