"""`python -m penstock.train.report SECONDS FOLDER`: update the report of a running run.

Rank 0 starts it, and closes its standard input at the end of the run; the launcher writes the final
report. Runs at low priority.
"""

import sys
import time
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.core.os_errors import describe_os_error
from penstock.train.report.page import write_report
from penstock.train.trackers.sidecar import start_sidecar

NICENESS = 19
SHARE = 0.05
"""Maximum fraction of a CPU spent on rendering."""


def main(seconds: float, folder: Path) -> None:
    """Write the report now and every `seconds` seconds, until standard input closes."""
    end = start_sidecar(NICENESS)
    pause = 0.0
    while not end.event.wait(pause):
        began = time.process_time()
        try:
            write_report(folder, state="running")
        except (OSError, PenstockError) as error:
            # A full disk may have space again later.
            sys.stderr.write(f"no report was written: {describe_os_error(error)}\n")
            sys.stderr.flush()
        # Not wall time: at low priority on a busy machine a page may take minutes.
        pause = max(seconds, (time.process_time() - began) / SHARE)


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
