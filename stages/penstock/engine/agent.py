"""Torchrun, told to end when the process that started it ends.

`python -m penstock.engine.agent PARENT_PID TORCHRUN_ARGUMENTS...`
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

from penstock.core.orphan import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    try:
        main(sys.argv[2:])
    except SignalException as stopped:
        # Asked to stop, it has let the ranks save and end; its stack says nothing to anyone.
        sys.exit(128 + stopped.sigval)
