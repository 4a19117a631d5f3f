"""The `penstock` command: its subcommands and their options.

Each command imports its implementation when it runs, so that `--help` and a finished pipeline
return without heavy imports.
"""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.artifacts.commands import commands as artifact_commands
from penstock.cli.chat.options import chat_command
from penstock.cli.console import Console, run
from penstock.cli.data.commands import commands as data_commands
from penstock.cli.flow import deploy, flow
from penstock.cli.inspect_commands import check, doctor, plan, schema, translate
from penstock.cli.launch.options import launch
from penstock.cli.models import commands as model_commands
from penstock.cli.options import Config, Strict, add_command, overrides, run_request
from penstock.cli.releases import commands as release_commands
from penstock.cli.result_commands import evaluate, merge, report
from penstock.cli.serve import serve
from penstock.cli.single_command import select_command
from penstock.cli.usage_errors import raise_usage_error, require_hyphens, require_one_value
from penstock.config.loading.cli_overrides import split_overrides
from penstock.core import env
from penstock.core.errors import ConfigError

app = typer.Typer(
    name="penstock",
    epilog="Any field of the config can be written as --section.field value, for example "
    "--train.lr 2e-5.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Else typer (0.29.2) imports rich to format help.
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
    bool, typer.Option("--dry-run", help="Only print which stages are cached and what would run.")
]
NoUpstream = Annotated[
    bool,
    typer.Option(
        "--no-upstream", help="Fail if an input of the stage is missing, instead of building it."
    ),
]


def main(argv: Sequence[str] | None = None) -> None:
    """The console command. Exits with 0 or with an exit code of `penstock.core.errors`."""
    # Planning makes a hundred thousand objects that live until the end: collections of cycles after
    # every 700 of them are a tenth of a finished run.
    gc.set_threshold(50_000)
    atexit.register(_skip_final_gc)
    env.default(
        {
            # Otherwise tokenizers warns after a fork and huggingface_hub sends telemetry.
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            # Evaluation, chat and merges compute in this process.
            **env.openmp_waiting(),
            # To find plugins, pydantic reads the metadata of every installed distribution.
            "PYDANTIC_DISABLE_PLUGINS": "__all__",
        }
    )
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        require_hyphens(arguments)
        arguments_left, overrides[:] = split_overrides(arguments)
        _require_users(arguments_left)
        click_command = typer.main.get_command(select_command(app, next(iter(arguments_left), "")))
        require_one_value(click_command, arguments_left)
        # In its standalone mode click prints errors itself and exits with codes of its own.
        sys.exit(click_command(args=arguments_left, prog_name="penstock", standalone_mode=False))
    except (ConfigError, typer.TyperException) as error:
        # Through `run`: with --json, stdout ends with a JSON object after a usage error, too.
        sys.exit(run(Console("--json" in arguments), partial(raise_usage_error, error)))


def _require_users(arguments: Sequence[str]) -> None:
    # The shell leaves `~name` as it is where there is no such user, and so does expanduser: it
    # would name a folder here.
    for argument in arguments:
        if argument.startswith("~") and os.path.expanduser(argument) == argument:  # noqa: PTH111 - raises
            raise ConfigError(
                f"{argument}: {argument.partition('/')[0]} is no user of this machine."
            )


def _skip_final_gc() -> None:
    """Skip the garbage collection at interpreter exit, a fifth of the time of a finished run.

    Not with torch: nanobind-based extensions report the objects that are then left as leaks.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune language models: prepare, pack, train, export, push. Each stage is cached."""


def _print_plan(request: Any, console: Console, name: Any = None) -> dict[str, Any]:
    from penstock.cli.plan.stages import print_plan
    from penstock.pipeline.plan import plan

    run = request.load()
    if name:
        plan(run, (name,))  # raises where the run has no such stage
    return print_plan(run, console)


def _run_stage(
    console: Console,
    config: Path,
    name: Any,
    rebuild: Any,
    no_upstream: bool = False,
    dry_run: bool = False,
) -> dict[str, Any] | None:
    from penstock.cli.run import run_stage

    request = run_request(config)
    if dry_run:
        return _print_plan(request, console, name)
    run_stage(request, name, rebuild, console, upstream=not no_upstream)
    return None


def _rebuild_options(force: list[str], start: str | None, fresh: bool = False) -> Any:
    from penstock.api.pipeline import rebuild_options

    return rebuild_options(force, start, fresh=fresh)


def run_command(
    console: Console,
    config: Config,
    force: Force = [],  # noqa: B006 - typer reads it and never writes it
    start: From = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    strict: Strict = False,
) -> dict[str, Any] | None:
    """Run the whole pipeline; stages that are done are reused."""
    from penstock.cli.run import run_chain

    request, rebuild = run_request(config, strict=strict), _rebuild_options(force, start, fresh)
    if dry_run:
        return _print_plan(request, console)
    return run_chain(request, rebuild, console)


def _stage_command(name: Any, summary: str) -> None:
    def stage_command(
        console: Console,
        config: Config,
        force: Force = [],  # noqa: B006
        start: From = None,
        fresh: Fresh = False,
        no_upstream: NoUpstream = False,
        dry_run: DryRun = False,
    ) -> dict[str, Any] | None:
        rebuild = _rebuild_options(force, start, fresh)
        return _run_stage(console, config, name, rebuild, no_upstream, dry_run)

    def stage_command_before_training(
        console: Console,
        config: Config,
        force: Force = [],  # noqa: B006
        start: From = None,
        no_upstream: NoUpstream = False,
        dry_run: DryRun = False,
    ) -> dict[str, Any] | None:
        return stage_command(console, config, force, start, False, no_upstream, dry_run)

    function = stage_command_before_training if name in ("encode", "reference") else stage_command
    add_command(app, function, name, summary=summary)


def prepare(
    console: Console,
    config: Config,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Tokenize only the I-th of N shares of the missing slices, on any of N machines "
            "that share data.dataset_prepared_path. Afterwards run prepare without it.",
        ),
    ] = None,
    force: Force = [],  # noqa: B006
    start: From = None,
    no_upstream: NoUpstream = False,
    dry_run: DryRun = False,
) -> dict[str, Any] | None:
    """Load the data, apply the chat template, tokenize and split."""
    rebuild = _rebuild_options(force, start)
    if shard is None or dry_run:
        return _run_stage(console, config, "prepare", rebuild, no_upstream, dry_run)
    from penstock.cli.prepare_shard import prepare_share

    prepare_share(run_request(config), shard, rebuild, console)
    return None


def pack(
    console: Console,
    config: Config,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print rows and fill rate of each packing method."),
    ] = False,
    force: Force = [],  # noqa: B006
    start: From = None,
    no_upstream: NoUpstream = False,
) -> None:
    """Pack samples into sequences of a fixed length."""
    rebuild = _rebuild_options(force, start)
    if dry_run:
        from penstock.cli.pack_dry_run import compare_packing

        compare_packing(run_request(config), rebuild, console, upstream=not no_upstream)
    else:
        _run_stage(console, config, "pack", rebuild, no_upstream)


def stage(
    console: Console,
    name: Annotated[str, typer.Argument(metavar="STAGE", help="As in pipeline.extra_stages.")],
    config: Config,
    force: Force = [],  # noqa: B006
    start: From = None,
    no_upstream: NoUpstream = False,
    dry_run: DryRun = False,
) -> dict[str, Any] | None:
    """Run a stage of an installed package."""
    rebuild = _rebuild_options(force, start)
    return _run_stage(console, config, name, rebuild, no_upstream, dry_run)


def recur(console: Console, config: Config) -> dict[str, Any]:
    """Train on new samples; release the model if it is better."""
    from penstock.cli.run import run_tick

    return run_tick(run_request(config), console)


def init(
    console: Console,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|DATA", help="A recipe's name, or your data.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the recipes.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="For data: the model, a folder or a hub id.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> dict[str, Any]:
    """Copy a recipe, or write a config for data of your own."""
    from penstock.cli.init.recipes import copy_recipe, list_recipes, recipes

    if name is None or listing:
        return list_recipes(console)
    if name not in recipes() and Path(name).exists():
        from penstock.cli.init.own_data import write_config_for_data

        return write_config_for_data(name, output, model, console, overwrite=overwrite)
    if model is not None:
        raise ConfigError(
            f"--model is for data, and {name} is neither a file nor a folder.\n"
            "  Leave it out, or edit model.model_path in the recipe's copy."
        )
    return copy_recipe(
        name, output or Path(f"{name.removesuffix('.yaml')}.yaml"), console, overwrite=overwrite
    )


add_command(app, run_command, "run")
add_command(app, prepare)
add_command(app, pack)
for _name, _summary in {
    "encode": "Compute features of images (data.encode_images).",
    "reference": "Compute the reference model's log-probs of all completions.",
    "train": "Train on packed sequences; resumes from the newest checkpoint.",
    "export": "Write the trained model as a Hugging Face folder.",
    "push": "Send the exported model to the hub or to a URL.",
}.items():
    _stage_command(_name, _summary)
for _function in (stage, recur, launch, plan, check, translate):
    add_command(app, _function)
add_command(app, schema)
for _function in (doctor, serve, flow, deploy):
    add_command(app, _function)
add_command(app, chat_command, "chat")
add_command(app, report)
add_command(app, merge)
add_command(app, evaluate, "eval")
add_command(app, init)
app.add_typer(artifact_commands, name="artifacts")
app.add_typer(release_commands, name="releases")
app.add_typer(data_commands, name="data")
app.add_typer(model_commands, name="models")


if __name__ == "__main__":
    main()
