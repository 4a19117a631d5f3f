"""`python -m penstock.train.trackers NAME FOLDER`: carry the run in FOLDER to a tracker.

The leading rank starts it, and ends its input when no more records come. It also ends by itself
when that rank dies.
"""

import sys
from pathlib import Path

from penstock.train.trackers.uploader import main

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
