"""A Slurm batch script for a run: one launcher per node, which starts the ranks of the node."""

import math
import re
import shlex
from pathlib import Path
from typing import Literal

from penstock.cli.run import Request
from penstock.config.schema.run import RunConfig
from penstock.core.process.rendezvous_endpoint import PORT, parse_endpoint

PER_NODE_FIELDS = ("launch.node_rank", "launch.rdzv_endpoint")
"""Fields that the script sets on each node."""

MARGIN_SECONDS = 60
"""Added to the time that ranks have to save: Slurm's signal may be this late."""


def slurm_script(
    run: RunConfig,
    request: Request,
    *,
    ranks: int | Literal["auto"],
    gpus: int | None,
    cpus: int | None,
) -> str:
    """A script for `sbatch`, whose options (--partition, --account, --time) override the script's.

    `ranks`, `gpus` and `cpus` are per node; nodes are exclusive if `gpus` or `cpus` is None, which
    are then all of the node's.
    """
    launch = run.launch
    options = {
        "job-name": re.sub(r"\W+", "-", run.pipeline.name).strip("-") or "penstock",
        "nodes": launch.nnodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "cpus-per-task": cpus,
        # On SIGTERM training saves and ends; by default Slurm kills it at the time limit.
        "signal": f"TERM@{math.ceil(launch.stop_timeout) + MARGIN_SECONDS}",
        "output": "%x-%j.log",
        # Requeued after a preemption, it resumes from its newest checkpoint.
        "requeue": "",
        # A requeued job would otherwise truncate the log of the attempt before it.
        "open-mode": "append",
        "chdir": shlex.quote(str(Path.cwd())),
    }
    if cpus is None or gpus is None:
        options["exclusive"] = ""
    lines = [
        f"#SBATCH --{name}={value}" if value != "" else f"#SBATCH --{name}"
        for name, value in options.items()
        if value is not None
    ]
    if gpus is None:
        lines.append(
            "# launch.nproc_per_node is auto: a process for each GPU of an exclusive node. Where "
            "GPUs\n# must be asked for: penstock launch --print slurm --gpus N."
        )
    # Nodes end at different times: one still saves or exports when another has exited.
    step = ["srun", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none"]
    if cpus is not None:
        # Since Slurm 22.05, srun does not inherit it from sbatch.
        step.append(f"--cpus-per-task={cpus}")
    arguments = request.arguments(*PER_NODE_FIELDS, "launch.nproc_per_node")
    command = shlex.join(["penstock", "run", *arguments, f"--launch.nproc_per_node={ranks}"])
    head = ["#!/bin/bash", *lines, "", "set -eu"]
    if launch.nnodes == 1:
        return "\n".join([*head, f"{shlex.join(step)} {command}", ""])
    port = parse_endpoint(launch.rdzv_endpoint)[1] if launch.rdzv_endpoint else PORT
    # The rank of a node is known only there.
    node_command = (
        # exec: bash, which Slurm's SIGTERM ends at once, must not stand between the two.
        f"exec {command} "
        '--launch.node_rank="$SLURM_NODEID" --launch.rdzv_endpoint="$PENSTOCK_ENDPOINT"'
    )
    return "\n".join(
        [
            *head,
            'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "first=${nodes%%$'\\n'*}",
            f"export PENSTOCK_ENDPOINT=$first:{port}",
            f"{shlex.join(step)} bash -c {shlex.quote(node_command)}",
            "",
        ]
    )
