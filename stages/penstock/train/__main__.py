"""`python -m penstock.train JOB.json`: one rank, started by torchrun.

DataLoader worker processes do not import `__main__` again, so they need not import the training
code.
"""

import sys
from pathlib import Path

from penstock.train.rank import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
