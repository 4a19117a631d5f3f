"""`penstock releases list|show|verify|rollback|prune`: the releases of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import Console, table
from penstock.cli.options import add_command, overrides
from penstock.core.errors import ArtifactError, ConfigError
from penstock.core.remote.urls import is_url

if TYPE_CHECKING:  # imported where it is used: `--help` imports this module
    from penstock.core.releases.local import ReleaseStore

JsonObject = dict[str, Any]

SHOWN_DECISIONS = 10
"""Number of decisions that `show` prints."""

Where = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|FOLDER|URL", help="A run's YAML file, or the folder or URL of its releases."
    ),
]
Number = Annotated[int | None, typer.Argument(help="Which one. Default: the latest.")]


def list_releases(console: Console, location: Where) -> JsonObject:
    """List all releases: number, date, metrics, origin."""
    store = _open_store(location)
    latest, withdrawn = store.latest(), store.withdrawn
    manifests = [store.manifest(number) for number in store.numbers()]
    rows = [("", "release", "created", "samples", "evaluation", "from", "export")]
    rows += [_row(manifest, latest, withdrawn) for manifest in manifests]
    console.result(table(rows) if manifests else f"{store.where} holds no releases.")
    releases = [{**manifest["facts"], "created": manifest["created"]} for manifest in manifests]
    return {"latest": latest, "withdrawn": sorted(withdrawn), "releases": releases}


def show_release(console: Console, location: Where, number: Number = None) -> JsonObject:
    """Print one release: folder, lineage, metrics and decisions."""
    import yaml

    store = _open_store(location)
    chosen = store.latest() if number is None else number
    if chosen is None:
        raise ConfigError(f"{store.where} holds no releases.\n  penstock recur makes the first.")
    manifest, folder = store.manifest(chosen), store.folder(chosen)
    decisions = store.decisions()[-SHOWN_DECISIONS:]
    facts = {name: value for name, value in manifest["facts"].items() if name != "data_files"}
    shown = {"path": str(folder), **manifest, "facts": facts}
    del shown["files"]
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip()
    lines = [f"{decision['time']}  {decision['line']}" for decision in decisions]
    console.result("\n".join([text, "", "latest decisions:", *lines]))
    return {"manifest": manifest, "path": str(folder), "decisions": decisions}


def verify_releases(console: Console, location: Where) -> JsonObject:
    """Read every file of every release; exit 1 if one is damaged."""
    from penstock.cli.artifacts.entries import LocalEntry

    store = _open_store(location)
    numbers = store.numbers()
    entries = [LocalEntry(store.manifest(n), store.folder(n)) for n in numbers]
    faults = [fault for entry in entries for fault in entry.faults()]
    if faults:
        raise ArtifactError(
            "\n".join(faults) + "\n  Roll back to a release that is whole, and prune this one."
        )
    console.result(f"{len(numbers)} releases are whole.")
    return {"verified": numbers}


def roll_back_release(
    console: Console,
    location: Where,
    to: Annotated[
        int | None, typer.Option("--to", metavar="NUMBER", help="Default: the one before.")
    ] = None,
) -> JsonObject:
    """Point `latest` to an earlier release; withdraw later ones.

    With the number of a later release it rolls forward.
    """
    from penstock.core.releases.local import release_folder_name
    from penstock.pipeline.recurring import Decision
    from penstock.pipeline.releasing import roll_back

    store = _open_store(location)
    before, now = roll_back(store, to, console.say)
    was = release_folder_name(before) if before else "nothing that is whole"
    line = f"{store.where} points to {release_folder_name(now)}; it pointed to {was}"
    store.append_decision(Decision("rolled_back", line, now).as_json())
    console.result(line)
    return {"latest": now, "before": before}


def prune_releases(
    console: Console,
    location: Where,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep this many of the newest releases.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
) -> JsonObject:
    """Delete old releases, never the latest nor the one before it.

    Results that only they were made from can be pruned afterwards: penstock artifacts prune.
    """
    from penstock.core.releases.local import release_folder_name
    from penstock.pipeline.releasing import prunable

    store = _open_store(location)
    with store.writing(console.say):
        chosen = prunable(store, keep_last)
        for number in chosen:
            if not dry_run:
                store.delete(number)
            console.result(
                f"{'would delete' if dry_run else 'deleted'} {release_folder_name(number)}"
            )
    console.result(f"{len(chosen)} releases")
    return {"pruned": chosen}


def _open_store(location: str) -> "ReleaseStore":
    from penstock.core.releases.remote import open_release_store

    if is_url(location) or Path(location).is_dir():
        return open_release_store(location)
    from penstock.config.loading.load import load
    from penstock.pipeline.releasing import open_releases

    return open_releases(load(Path(location), overrides))


def _row(manifest: dict[str, Any], latest: int | None, withdrawn: set[int]) -> tuple[str, ...]:
    from penstock.core.releases.local import release_folder_name

    facts = manifest["facts"]
    number, started = facts["number"], facts["started_from"]
    mark = "latest" if number == latest else "withdrawn" if number in withdrawn else ""
    return (
        mark,
        release_folder_name(number),
        manifest["created"],
        str(facts["known_samples"]),
        _format_figures(facts["evaluation"]),
        release_folder_name(started) if started else "",
        manifest["inputs"]["export"]["key"][:8],
    )


def _format_figures(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return ""
    metric = evaluation["metric"]
    text = f"{metric} {evaluation['new'][metric]:.6g}"
    before = evaluation["released"].get(metric)
    return text if before is None else f"{text} (before: {before:.6g})"


commands = typer.Typer(
    help="List, show, verify, roll back and prune releases.", no_args_is_help=True
)
add_command(commands, list_releases, "list")
add_command(commands, show_release, "show")
add_command(commands, verify_releases, "verify")
add_command(commands, roll_back_release, "rollback")
add_command(commands, prune_releases, "prune")
