"""`penstock launch` and its options."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import Config, run_request
from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class LaunchTarget:
    """The options that describe the machines of the run."""

    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs per machine. Default: one per process."),
    ] = None
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs per machine. Default: all.")] = None
    image: Annotated[str | None, typer.Option(help="Kubernetes: container image.")] = None
    claim: Annotated[
        str | None, typer.Option(help="Kubernetes: PersistentVolumeClaim for data and results.")
    ] = None
    mount: Annotated[str, typer.Option(help="Kubernetes: mount path of the claim.")] = "/data"
    """Relative paths of the config are below it."""
    secret: Annotated[
        str | None, typer.Option(help="Kubernetes: Secret whose keys become environment variables.")
    ] = None


def launch(
    console: Console,
    config: Config,
    launcher: Annotated[
        str | None,
        typer.Argument(
            metavar="[torchrun|slurm|kubernetes]", help="With --print: only this launcher."
        ),
    ] = None,
    printing: Annotated[
        bool,
        typer.Option("--print", help="Print what starts the run on other machines; start nothing."),
    ] = False,
    *,
    target: LaunchTarget,
) -> dict[str, Any] | None:
    """Train here, or print how to start the run on other machines."""
    if printing:
        from penstock.cli.launch.command import print_launch

        return print_launch(run_request(config), launcher, target, console)
    if launcher or target != LaunchTarget():
        raise ConfigError(
            "penstock launch starts the run on this machine, where only the config says how.\n"
            "  Add --print to see what starts it elsewhere."
        )
    from penstock.cli.run import run_stage
    from penstock.pipeline.plan import RebuildOptions

    run_stage(run_request(config), "train", RebuildOptions(), console, upstream=True)
    return None
