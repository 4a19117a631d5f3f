"""`python -m penstock.reference JOB.json`: one rank, started by torchrun."""

import sys
from pathlib import Path

from penstock.reference.rank import reference
from penstock.train.rank import main

if __name__ == "__main__":
    main(Path(sys.argv[1]), reference)
