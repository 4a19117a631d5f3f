"""`penstock launch`: trains here, or prints the command or file that starts the run elsewhere."""

import shlex
from dataclasses import replace
from typing import Any, Literal, get_args

from penstock.cli.console import Console
from penstock.cli.launch.kubernetes import kubernetes_job
from penstock.cli.launch.options import LaunchTarget
from penstock.cli.launch.slurm import slurm_script
from penstock.cli.run import Request
from penstock.config.loading.cli_overrides import Override
from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.process.rendezvous_endpoint import PORT
from penstock.estimate.machine import check_layout
from penstock.train.launch.torchrun import build_environment, torchrun_arguments_by_hand

Launcher = Literal["torchrun", "slurm", "kubernetes"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)


def print_launch(
    request: Request, launcher: str | None, target: LaunchTarget, console: Console
) -> dict[str, Any]:
    """Print the launch text for `launcher`, or for all launchers with titles; returns them.

    Raises ConfigError for an invalid layout or a missing setting.
    """
    if launcher is not None and launcher not in LAUNCHERS:
        raise ConfigError(
            f"{launcher} is no way to launch.\n  Write one of {', '.join(LAUNCHERS)}."
        )
    run, has_endpoint = _load(request)
    if run.launch.nproc_per_node == "auto" and target.gpus is not None:
        run = run.with_fields("launch", nproc_per_node=max(1, target.gpus))
    if run.launch.nproc_per_node != "auto":
        check_layout(run)
    texts: dict[str, str] = {}
    for name in [launcher] if launcher else LAUNCHERS:
        try:
            texts[name] = _launch_text(name, run, request, target, has_endpoint)
        except ConfigError as error:
            if launcher:
                raise
            texts[name] = "".join(f"# {line.strip()}\n" for line in str(error).splitlines())
    titled = [text if launcher else f"# ---- {name} ----\n{text}" for name, text in texts.items()]
    console.result("\n".join(titled).rstrip("\n"))
    return {"launch": texts}


def _load(request: Request) -> tuple[RunConfig, bool]:
    """The run, and whether its config has the rendezvous endpoint."""
    try:
        return request.load(), True
    except ConfigError:
        # A scheduler assigns the machines, so the rendezvous endpoint need not be set for it.
        endpoint = Override("launch.rdzv_endpoint", f"first:{PORT}")
        return replace(request, overrides=(*request.overrides, endpoint)).load(), False


def _launch_text(
    launcher: str,
    run: RunConfig,
    request: Request,
    target: LaunchTarget,
    has_endpoint: bool,
) -> str:
    if launcher == "torchrun":
        if not has_endpoint:
            request.load()  # raises what is missing
        check_layout(run)
        return _torchrun_lines(run, request)
    nproc = run.launch.nproc_per_node
    if launcher == "slurm":
        # The machine that prints the script need not be like those that run it.
        gpus = target.gpus if target.gpus is not None or nproc == "auto" else nproc
        return slurm_script(run, request, ranks=nproc, gpus=gpus, cpus=target.cpus)
    ranks = _ranks_per_node(run)
    check_layout(run.with_fields("launch", nproc_per_node=ranks))
    gpus = ranks if target.gpus is None else target.gpus
    if not target.image:
        raise ConfigError(
            "A Kubernetes job needs the image that its containers are made of.\n"
            "  Add --image REGISTRY/NAME:TAG, of an image in which Penstock is installed."
        )
    return kubernetes_job(run, target, ranks=ranks, gpus=gpus)


def _torchrun_lines(run: RunConfig, request: Request) -> str:
    """One command per machine. Each machine needs the config file and the same folders.

    Raises ConfigError for several machines without a rendezvous endpoint.
    """
    lines: list[str] = []
    for number in range(run.launch.nnodes):
        local_run = run.with_fields("launch", node_rank=number)
        command = [
            *("env", *(f"{name}={value}" for name, value in build_environment(local_run).items())),
            *("torchrun", *torchrun_arguments_by_hand(local_run)),
            *("-m", "penstock.cli.train", *request.arguments("launch.node_rank")),
        ]
        title = f"# machine {number}\n" if run.launch.nnodes > 1 else ""
        lines.append(f"{title}{shlex.join(command)}\n")
    return "".join(lines)


def _ranks_per_node(run: RunConfig) -> int:
    """Processes per machine. Raises ConfigError if `auto` cannot be resolved on this machine."""
    nproc = run.launch.nproc_per_node
    if nproc != "auto":
        return nproc
    if num_gpus := env.num_gpus():
        return num_gpus
    raise ConfigError(
        "launch.nproc_per_node is auto, this machine has no GPU to go by, and Kubernetes must be "
        "told how many to reserve.\n  Add --launch.nproc_per_node with the GPUs of one machine."
    )
