"""`python -m penstock.train.trackers NAME FOLDER`: upload the run in FOLDER to a tracker.

Rank 0 starts it, and closes its standard input when no more records come. It also exits when that
rank dies.
"""

import sys
from pathlib import Path

from penstock.train.trackers.uploader import main

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
