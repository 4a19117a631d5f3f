"""`python -m penstock.server.worker JOB.json`: one worker rank, started by torchrun."""

import sys
from pathlib import Path

from penstock.server.worker.main import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
