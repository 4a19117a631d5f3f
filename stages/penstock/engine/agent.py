"""Torchrun, told to end when the process that started it ends.

`python -m penstock.engine.agent PARENT_PID TORCHRUN_ARGUMENTS...`
"""

import sys

from torch.distributed.run import main

from penstock.core.orphan import end_with_parent

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    main(sys.argv[2:])
