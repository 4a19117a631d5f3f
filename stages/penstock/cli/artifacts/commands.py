"""`penstock artifacts list|show|verify|prune`: the results in the store and their integrity."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import Console, table
from penstock.cli.options import add_command
from penstock.core.errors import ArtifactError, ConfigError
from penstock.core.remote.urls import is_url

if TYPE_CHECKING:  # imported where it is used: `--help` imports this module
    from penstock.cli.artifacts.entries import Entry

Roots = Annotated[
    list[str] | None,
    typer.Option(
        "--root",
        help="A folder or a URL with results: a data.dataset_prepared_path, a train.output_dir or "
        "a pipeline.artifacts_path. Repeatable. Default: every such folder below this one.",
    ),
]
Key = Annotated[str, typer.Argument(help="The first digits of a key, or a folder.")]

SEARCH_DEPTH = 5
"""Depth of the search for results below the working directory."""


def list_artifacts(console: Console, root: Roots = None) -> dict[str, Any]:
    """List all results: stage, key, state, size, time, location."""
    entries = list(find_entries(root))
    rows = [("stage", "key", "standing", "size", "created", "where")]
    rows += [_row(entry) for entry in entries]
    console.result(table(rows) if entries else "There are no results here.")
    return {"artifacts": [_entry_as_json(entry) for entry in entries]}


def show_artifact(console: Console, key: Key, root: Roots = None) -> dict[str, Any]:
    """Print a result's manifest: identity, inputs, files and facts."""
    import yaml

    entry = _find_entry(key, root)
    if entry.manifest is None:
        raise ArtifactError(f"{entry.where} is incomplete and has no manifest yet.")
    shown = {name: value for name, value in entry.manifest.items() if name != "files"}
    shown["files"] = len(entry.manifest["files"])
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    console.result(text.rstrip())
    return {"manifest": entry.manifest}


def verify_artifacts(
    console: Console,
    key: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    root: Roots = None,
) -> dict[str, Any]:
    """Read every file again; exit 1 if one differs from the manifest."""
    entries = [_find_entry(key, root)] if key else [e for e in find_entries(root) if e.manifest]
    faults = [fault for entry in entries for fault in entry.faults()]
    if faults:
        raise ArtifactError(
            "\n".join(faults) + "\n  Restore these files, or build again with --force."
        )
    console.result(f"{len(entries)} results are whole.")
    return {"verified": [entry.where for entry in entries]}


def prune_artifacts(
    console: Console,
    root: Roots = None,
    keep_last: Annotated[
        int, typer.Option(help="Keep this many of the newest results of each stage.")
    ] = 1,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only results older than this: 30d, 12h, 45m, 2w.")
    ] = "0d",
    unreferenced: Annotated[
        bool,
        typer.Option(
            "--unreferenced",
            help="Also inputs that only deleted results were made from: everything that no "
            "training run, no release and no other result needs.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
) -> dict[str, Any]:
    """Delete old results other than training runs, and unused slices.

    Images and features of images are deleted as slices are.

    Never deleted are inputs of other results or releases, results that a process uses, training
    runs, and slices and features of today. Slices at a URL are not deleted: no machine knows all
    their users.
    """
    from penstock.cli.artifacts.prune import choose_prunable, find_caches, parse_age, prune

    age = parse_age(older_than)
    entries = _add_releases(list(find_entries(root)))
    chosen = choose_prunable(entries, keep_last, age, "chains" if unreferenced else "leaves")
    folders = [Path(folder) for folder in root or ["."] if not is_url(folder)]
    caches = [cache for folder in folders for cache in find_caches(folder, SEARCH_DEPTH)]
    return prune(entries, chosen, sorted(caches), age, console, dry_run=dry_run)


def find_entries(roots: list[str] | None) -> "Iterator[Entry]":
    """Every result below `roots`, or below the working directory, sorted by path."""
    from penstock.cli.artifacts.entries import local_entries, remote_entries

    for missing in (r for r in roots or [] if not is_url(r) and not Path(r).is_dir()):
        raise ConfigError(f"--root {missing} is not a folder.")
    for root in roots or ["."]:
        yield from remote_entries(root) if is_url(root) else local_entries(Path(root), SEARCH_DEPTH)


def _add_releases(entries: "list[Entry]") -> "list[Entry]":
    """The results, and the releases beside them that are deeper than the search goes."""
    from penstock.cli.artifacts.entries import LocalEntry
    from penstock.core.cache.manifest import MANIFEST, read_manifest
    from penstock.pipeline.releasing import RELEASES

    locations = {entry.where for entry in entries}
    folders = {
        manifest_file.parent
        for entry in entries
        if isinstance(entry, LocalEntry)
        for manifest_file in entry.root.glob(f"{RELEASES}/*/*/{MANIFEST}")
    }
    releases = [LocalEntry(read_manifest(folder), folder) for folder in sorted(folders)]
    return [*entries, *(entry for entry in releases if entry.where not in locations)]


def _find_entry(key: str, roots: list[str] | None) -> "Entry":
    from penstock.cli.artifacts.entries import LocalEntry, is_result
    from penstock.core.cache.manifest import read_manifest

    if key and is_url(key):
        roots, key = [key], ""
    elif key and is_result(Path(key)):
        return LocalEntry(read_manifest(Path(key)), Path(key))
    matches = [entry for entry in find_entries(roots) if entry.key.startswith(key)]
    if not matches:
        raise ConfigError(f"no result's key starts with {key}.\n  See penstock artifacts list.")
    if len(matches) > 1:
        locations = ", ".join(entry.where for entry in matches)
        raise ConfigError(
            f"{len(matches)} keys start with {key}: {locations}.\n  Give more digits."
        )
    return matches[0]


def _row(entry: "Entry") -> tuple[str, ...]:
    manifest = entry.manifest
    standing, created = ("cached", manifest["created"]) if manifest else ("partial", "")
    size = f"{entry.num_bytes / 1e6:.1f} MB"
    return entry.stage, entry.key[:8], standing, size, created, entry.where


def _entry_as_json(entry: "Entry") -> dict[str, Any]:
    stage, _, standing, _, created, location = _row(entry)
    return {
        "stage": stage,
        "key": entry.key,
        "standing": standing,
        "bytes": entry.num_bytes,
        "created": created or None,
        "path": location,
    }


commands = typer.Typer(
    help="List, show, verify and prune the results of stages.", no_args_is_help=True
)
add_command(commands, list_artifacts, "list")
add_command(commands, show_artifact, "show")
add_command(commands, verify_artifacts, "verify")
add_command(commands, prune_artifacts, "prune")
