"""Entry point of a server process other than a worker: dies with the launcher, and sets up logging.

`python -m penstock.server.launch.child_main PARENT_PID NAME MODULE JOB` runs `python -m MODULE JOB`
with the log name NAME.
"""

import logging
import runpy
import sys
from pathlib import Path

from penstock.core.process.die_with_parent import end_with_parent
from penstock.server.launch.job import ServerJob


def main(parent: str, name: str, module: str, job: str) -> None:
    """Run the module to its end."""
    end_with_parent(int(parent))
    logging.basicConfig(
        level=ServerJob.read(Path(job)).config.log_level,
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    sys.argv = [module, job]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
