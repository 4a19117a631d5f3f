"""A Slurm batch script for a run: one launcher on each node, which starts that node's ranks."""

import math
import re
import shlex
from pathlib import Path

from penstock.cli.launch.torchrun import shell_args
from penstock.cli.run import Request
from penstock.config.schema.run import RunConfig
from penstock.core.process.rendezvous import PORT, parse_endpoint

PER_NODE_FIELDS = ("launch.node_rank", "launch.rdzv_endpoint")
"""What each node is told by the script itself."""

MARGIN_SECONDS = 60
"""Beyond the time that ranks have to save: Slurm may signal that much late."""


def slurm_script(
    run: RunConfig, request: Request, *, ranks: int, gpus: int, cpus: int | None
) -> str:
    """For `sbatch`, whose own options (--partition, --account, --time) win over what is in it.

    `ranks` processes, `gpus` and `cpus` are those of one node; whole nodes where `cpus` is None.
    """
    launch = run.launch
    options = {
        "job-name": re.sub(r"\W+", "-", run.pipeline.name).strip("-") or "penstock",
        "nodes": launch.nnodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "cpus-per-task": cpus,
        # Training saves and ends when it is told to; the default would kill it at the time limit.
        "signal": f"TERM@{math.ceil(launch.stop_timeout) + MARGIN_SECONDS}",
        "output": "%x-%j.log",
        # Started again after a preemption, it goes on from its newest checkpoint.
        "requeue": "",
        "open-mode": "append",
        "chdir": shlex.quote(str(Path.cwd())),
    }
    if cpus is None:
        options["exclusive"] = ""
    lines = [
        f"#SBATCH --{name}={value}" if value != "" else f"#SBATCH --{name}"
        for name, value in options.items()
        if value is not None
    ]
    # Nodes end at their own pace: one is still saving, or exporting, when another has left.
    step = ["srun", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none"]
    if cpus is not None:
        step.append(f"--cpus-per-task={cpus}")
    words = shell_args(request, *PER_NODE_FIELDS, "launch.nproc_per_node")
    command = shlex.join(["penstock", "run", *words, f"--launch.nproc_per_node={ranks}"])
    if launch.nnodes == 1:
        return "\n".join(
            ["#!/bin/bash", *lines, "", "set -eu", f"{shlex.join(step)} {command}", ""]
        )
    port = parse_endpoint(launch.rdzv_endpoint)[1] if launch.rdzv_endpoint else PORT
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            "set -eu",
            'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "first=${nodes%%$'\\n'*}",
            f"export PENSTOCK_ENDPOINT=$first:{port}",
            f"{shlex.join(step)} bash -c " + shlex.quote(_node_command(command)),
            "",
        ]
    )


def _node_command(command: str) -> str:
    """What a node runs: it alone knows its number."""
    return (
        f"exec {command} "
        '--launch.node_rank="$SLURM_NODEID" --launch.rdzv_endpoint="$PENSTOCK_ENDPOINT"'
    )
