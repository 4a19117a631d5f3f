"""`penstock`: argv -> plan -> store. This file knows the commands and their options, no more.

What a command needs is imported when it runs: `--help` and a finished pipeline answer at once.
"""

import atexit
import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.chat.options import add_chat
from penstock.cli.console import Console, run
from penstock.cli.flow.commands import add_flow_commands
from penstock.cli.inspect_commands import add_looking
from penstock.cli.options import AsJson, Config, Debug, end
from penstock.cli.result_commands import add_results
from penstock.cli.serve import add_serving
from penstock.cli.single_command import only
from penstock.cli.usage_errors import refuse
from penstock.config.loading.cli_overrides import Override, split_overrides
from penstock.core import env
from penstock.core.errors import ConfigError

app = typer.Typer(
    name="penstock",
    epilog="Any field of the config can be written as --section.field value, for example "
    "--train.lr 2e-5.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Force = Annotated[
    list[str], typer.Option("--force", metavar="STAGE", help="Build this stage again. Repeatable.")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="STAGE", help="Build this stage and all after it again."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move another run's train.output_dir aside.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say which stages are done and what would run.")
]
NoUpstream = Annotated[
    bool, typer.Option("--no-upstream", help="Fail rather than build what the stage reads.")
]

_overrides: list[Override] = []


def main(argv: Sequence[str] | None = None) -> None:
    """The console command. Exits with 0, or what `penstock.core.errors` says."""
    atexit.register(_end_at_once)
    env.default(
        {
            # Tokenizers and the hub's library otherwise report home, or warn about their threads.
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            # Evaluation, answers and merges compute in this process.
            **env.openmp_waiting(),
            # Looking for pydantic plugins reads the metadata of every installed distribution.
            "PYDANTIC_DISABLE_PLUGINS": "__all__",
        }
    )
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        rest, _overrides[:] = split_overrides(arguments)
        asked = only(app, next(iter(rest), ""))
        sys.exit(asked(args=rest, prog_name="penstock", standalone_mode=False))
    except (ConfigError, typer.TyperException) as error:
        sys.exit(run(Console("--json" in arguments), partial(refuse, error)))


def _end_at_once() -> None:
    """Spare Python its searches for cycles among all modules at its end, a fifth of the time of a
    finished run. Libraries with bindings of their own complain of what is left; torch brings them.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def _say_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_say_version, help="Say it and exit."),
    ] = False,
) -> None:
    """Fine-tune language models: prepare, pack, train, export, push. Each stage is cached."""


def _explain(request: Any, console: Console, name: Any = None) -> dict[str, Any]:
    from penstock.cli.plan.stages import explain
    from penstock.plan import plan

    run = request.load()
    if name:
        plan(run, (name,))  # raises where the run has no such stage
    return explain(run, console)


def _wishes(force: list[str], start: str | None, fresh: bool = False) -> Any:
    from penstock.api.pipeline import rebuild_options

    return rebuild_options(force, start, fresh=fresh)


@app.command("run")
def run_command(
    config: Config,
    force: Force = [],  # noqa: B006 - typer reads it and never writes it
    start: From = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run the whole pipeline; stages that are done are reused."""
    console = Console(as_json, debug)

    def command() -> dict[str, Any] | None:
        from penstock.cli.run import Request, run_chain

        request, wishes = Request(config, tuple(_overrides)), _wishes(force, start, fresh)
        if dry_run:
            return _explain(request, console)
        run_chain(request, wishes, console)
        return None

    end(console, command)


def _stage_command(name: Any, summary: str) -> None:
    def stage_command(
        config: Config,
        force: Force = [],  # noqa: B006
        start: From = None,
        fresh: Fresh = False,
        no_upstream: NoUpstream = False,
        dry_run: DryRun = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        console = Console(as_json, debug)

        def command() -> dict[str, Any] | None:
            from penstock.cli.run import Request, run_stage

            request = Request(config, tuple(_overrides))
            wishes = _wishes(force, start, fresh)
            if dry_run:
                return _explain(request, console, name)
            run_stage(request, name, wishes, console, upstream=not no_upstream)
            return None

        end(console, command)

    def that_trains_nothing(
        config: Config,
        force: Force = [],  # noqa: B006
        start: From = None,
        no_upstream: NoUpstream = False,
        dry_run: DryRun = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        stage_command(config, force, start, False, no_upstream, dry_run, as_json, debug)

    app.command(name, help=summary)(that_trains_nothing if name == "reference" else stage_command)


@app.command()
def prepare(
    config: Config,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Only tokenise the I-th of N shares of what is missing, on any of N machines that "
            "share data.dataset_prepared_path. Without it, prepare then seals the data.",
        ),
    ] = None,
    force: Force = [],  # noqa: B006
    start: From = None,
    no_upstream: NoUpstream = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Load, template, tokenise and split the data."""
    console = Console(as_json, debug)

    def command() -> dict[str, Any] | None:
        from penstock.cli.prepare_shard import prepare_share
        from penstock.cli.run import Request, run_stage

        request = Request(config, tuple(_overrides))
        wishes = _wishes(force, start)
        if dry_run:
            return _explain(request, console, "prepare")
        if shard is not None:
            prepare_share(request, shard, wishes, console)
        else:
            run_stage(request, "prepare", wishes, console, upstream=not no_upstream)
        return None

    end(console, command)


@app.command()
def pack(
    config: Config,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print rows and fill rate of every method."),
    ] = False,
    force: Force = [],  # noqa: B006
    start: From = None,
    no_upstream: NoUpstream = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Lay whole samples into rows of fixed length."""
    console = Console(as_json, debug)

    def command() -> None:
        from penstock.cli.run import Request, run_stage

        request = Request(config, tuple(_overrides))
        wishes = _wishes(force, start)
        if dry_run:
            from penstock.cli.pack_dry_run import compare_packing

            compare_packing(request, wishes, console, upstream=not no_upstream)
        else:
            run_stage(request, "pack", wishes, console, upstream=not no_upstream)

    end(console, command)


for _name, _summary in {
    "reference": "Score every answer with the model that training starts from.",
    "train": "Train on the packed rows, from the newest checkpoint.",
    "export": "Write the trained model as a Hugging Face folder.",
    "push": "Send the exported model to the hub or to a URL.",
}.items():
    _stage_command(_name, _summary)


@app.command()
def recur(config: Config, as_json: AsJson = False, debug: Debug = False) -> None:
    """Train again if the sources have grown; release what is better."""
    console = Console(as_json, debug)

    def command() -> dict[str, Any]:
        from penstock.cli.recur import recur as look
        from penstock.cli.run import Request

        return look(Request(config, tuple(_overrides)), console)

    end(console, command)


@app.command()
def launch(
    config: Config,
    way: Annotated[
        str | None,
        typer.Argument(metavar="[torchrun|slurm|kubernetes]", help="With --print: this one alone."),
    ] = None,
    printing: Annotated[
        bool, typer.Option("--print", help="Print what starts the run elsewhere; start nothing.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of each machine. Default: one for each process."),
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="Processors of each machine. Default: all it has.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Kubernetes: the containers' image.")] = None,
    claim: Annotated[
        str | None, typer.Option(help="Kubernetes: PersistentVolumeClaim for data and results.")
    ] = None,
    mount: Annotated[str, typer.Option(help="Kubernetes: where it is mounted.")] = "/data",
    secret: Annotated[
        str | None, typer.Option(help="Kubernetes: Secret to take environment variables from.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train here, or print how to start the run on other machines."""
    console = Console(as_json, debug)

    def command() -> dict[str, Any] | None:
        from penstock.cli.run import Request, run_stage

        request = Request(config, tuple(_overrides))
        if printing:
            from penstock.cli.launch.command import LaunchTarget, print_launch
            from penstock.cli.launch.kubernetes import Cluster

            cluster = Cluster(image, claim, mount, secret) if image else None
            return print_launch(request, way, LaunchTarget(gpus, cpus, cluster), console)
        if way or image or claim or secret or gpus is not None or cpus is not None:
            raise ConfigError(
                "penstock launch starts the run on this machine, where only the config says how.\n"
                "  Add --print to see what starts it elsewhere."
            )
        run_stage(request, "train", _wishes([], None), console, upstream=True)
        return None

    end(console, command)


add_looking(app, _overrides)
add_serving(app, _overrides)
add_flow_commands(app, _overrides)
add_chat(app, _overrides)
add_results(app, _overrides)


@app.command()
def init(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|DATA", help="A recipe's name, or your data.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the recipes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a recipe to NAME.yaml here, or write run.yaml for data."""
    console = Console(as_json)

    def command() -> dict[str, Any]:
        from penstock.cli.init import copy_recipe, init_own, list_recipes, recipes

        if name is None or listing:
            return list_recipes(console)
        if name not in recipes() and Path(name).exists():
            return init_own(Path(name), Path(), console)
        return copy_recipe(name, Path(), console)

    end(console, command)


def _artifacts() -> typer.Typer:
    from penstock.cli.artifacts.commands import commands

    return commands


def _data() -> typer.Typer:
    from penstock.cli.data.commands import data_commands

    return data_commands(_overrides)


def _releases() -> typer.Typer:
    from penstock.cli.releases import release_commands

    return release_commands(_overrides)


app.add_typer(_artifacts(), name="artifacts")
app.add_typer(_releases(), name="releases")
app.add_typer(_data(), name="data")


if __name__ == "__main__":
    main()
