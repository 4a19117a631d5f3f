"""`penstock launch`: trains here, or prints the command or file that starts the run elsewhere."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from penstock.cli.console import Console
from penstock.cli.launch.kubernetes import Cluster, kubernetes_job
from penstock.cli.launch.slurm import slurm_script
from penstock.cli.launch.torchrun import torchrun_lines
from penstock.cli.run import Request
from penstock.config.loading.cli_overrides import Override
from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.process.rendezvous_endpoint import PORT
from penstock.estimate.machine import check_layout

Launcher = Literal["torchrun", "slurm", "kubernetes"]
EndpointSource = Literal["written", "unknown"]
"""Whether the config has the rendezvous endpoint."""
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)


@dataclass(frozen=True)
class LaunchTarget:
    """The options that describe the machines of the run."""

    gpus: int | None = None
    """GPUs per machine; None: one per process."""
    cpus: int | None = None
    """CPUs per machine; None: all."""
    cluster: Cluster | None = None
    """Kubernetes settings; None if they are not given."""


def print_launch(
    request: Request, launcher: str | None, elsewhere: LaunchTarget, console: Console
) -> dict[str, Any]:
    """Print the launch text for `launcher`, or for all launchers with titles; returns them.

    Raises ConfigError for an invalid layout or a missing setting.
    """
    if launcher is not None and launcher not in LAUNCHERS:
        raise ConfigError(
            f"{launcher} is no way to launch.\n  Write one of {', '.join(LAUNCHERS)}."
        )
    run, endpoint = _load(request)
    if run.launch.nproc_per_node == "auto" and elsewhere.gpus is not None:
        run = _with_ranks(run, max(1, elsewhere.gpus))
    if run.launch.nproc_per_node != "auto":
        check_layout(run)
    texts: dict[str, str] = {}
    for name in [launcher] if launcher else LAUNCHERS:
        try:
            texts[name] = _launch_text(name, run, request, elsewhere, endpoint)
        except ConfigError as error:
            if launcher:
                raise
            texts[name] = "".join(f"# {line.strip()}\n" for line in str(error).splitlines())
    titled = [text if launcher else f"# ---- {name} ----\n{text}" for name, text in texts.items()]
    console.result("\n".join(titled).rstrip("\n"))
    return {"launch": texts}


def _load(request: Request) -> tuple[RunConfig, EndpointSource]:
    try:
        return request.load(), "written"
    except ConfigError:
        # A scheduler assigns the machines, so the rendezvous endpoint need not be set for it.
        endpoint = Override("launch.rdzv_endpoint", f"first:{PORT}")
        return replace(request, overrides=(*request.overrides, endpoint)).load(), "unknown"


def _launch_text(
    launcher: str,
    run: RunConfig,
    request: Request,
    elsewhere: LaunchTarget,
    endpoint: EndpointSource,
) -> str:
    if launcher == "torchrun":
        if endpoint == "unknown":
            request.load()  # raises what is missing
        check_layout(run)
        return torchrun_lines(run, request)
    nproc = run.launch.nproc_per_node
    if launcher == "slurm":
        # The machine that prints the script need not be like those that run it.
        gpus = elsewhere.gpus if elsewhere.gpus is not None or nproc == "auto" else nproc
        return slurm_script(run, request, ranks=nproc, gpus=gpus, cpus=elsewhere.cpus)
    ranks = _ranks_per_node(run)
    check_layout(_with_ranks(run, ranks))
    gpus = ranks if elsewhere.gpus is None else elsewhere.gpus
    if elsewhere.cluster is None:
        raise ConfigError(
            "A Kubernetes job needs the image that its containers are made of.\n"
            "  Add --image REGISTRY/NAME:TAG, of an image in which Penstock is installed."
        )
    return kubernetes_job(run, elsewhere.cluster, ranks=ranks, gpus=gpus, cpus=elsewhere.cpus)


def _with_ranks(run: RunConfig, ranks: int) -> RunConfig:
    launch = run.launch.model_copy(update={"nproc_per_node": ranks})
    return run.model_copy(update={"launch": launch})


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
