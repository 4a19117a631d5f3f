"""The torchrun commands of a run, one for each machine."""

import shlex

from penstock.cli.run import Request
from penstock.config.schema.run import RunConfig
from penstock.train.launch.torchrun import build_environment, torchrun_arguments_by_hand


def torchrun_lines(run: RunConfig, request: Request) -> str:
    """One command per machine. Each machine needs the config file and the same folders.

    Raises ConfigError for several machines without a rendezvous endpoint.
    """
    commands = [_command(run, request, number) for number in range(run.launch.nnodes)]
    if len(commands) == 1:
        return f"{commands[0]}\n"
    titled = (f"# machine {number}\n{command}\n" for number, command in enumerate(commands))
    return "".join(titled)


def shell_args(request: Request, *left_out: str) -> list[str]:
    """The config and its overrides as arguments, without the fields `left_out`."""
    overrides = [
        f"{override.option}={override.text}"
        for override in request.overrides
        if override.name not in left_out
    ]
    return [str(request.file), *overrides]


def _command(run: RunConfig, request: Request, number: int) -> str:
    launch = run.launch.model_copy(update={"node_rank": number})
    local_run = run.model_copy(update={"launch": launch})
    variables = [f"{name}={value}" for name, value in build_environment(local_run).items()]
    command = [
        *("env", *variables),
        *("torchrun", *torchrun_arguments_by_hand(local_run)),
        *("-m", "penstock.cli.train", *shell_args(request, "launch.node_rank")),
    ]
    return shlex.join(command)
