"""`python -m penstock.train JOB.json`: one rank, started by torchrun.

A file of this name is not imported again by the processes that a rank starts to load rows, so these
need not import what trains.
"""

import sys
from pathlib import Path

from penstock.train.rank import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
