"""`penstock artifacts list|show|verify|prune`: what lies in the store, and whether it is whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import Console, run, table
from penstock.core.digests import sha256_of
from penstock.core.errors import ArtifactError, ConfigError
from penstock.core.files import read_json, regular_files, remove
from penstock.core.stage import ATTEMPT, MANIFEST
from penstock.core.store import REPLACED, lock_of, read_manifest

commands = typer.Typer(
    help="List, show, verify and prune what the stages left.", no_args_is_help=True
)

Roots = Annotated[
    list[Path] | None,
    typer.Option(
        "--root",
        help="A folder that holds results: a data.dataset_prepared_path, a train.output_dir or a "
        "pipeline.artifacts_path. Repeatable. Default: every such folder below this one.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")]
Key = Annotated[str, typer.Argument(help="The first digits of a key, or a folder.")]

SEARCH_DEPTH = 5
"""How far below the working directory results are looked for."""


@dataclass(frozen=True)
class Entry:
    """One result, sealed or not."""

    path: Path
    manifest: dict[str, Any] | None

    @property
    def key(self) -> str:
        """The whole key where it is known, else the folder's name."""
        return self.manifest["key"] if self.manifest else self.path.name

    @property
    def input_keys(self) -> set[str]:
        """Keys of what it was made from, or, unfinished, will be made from."""
        if self.manifest:
            return {source["key"] for source in self.manifest["inputs"].values()}
        return set(read_json(self.path / ATTEMPT)["inputs"].values())

    @property
    def num_bytes(self) -> int:
        """Bytes of everything in the folder."""
        return sum(path.stat().st_size for path in regular_files(self.path))


@commands.command("list")
def list_artifacts(root: Roots = None, as_json: AsJson = False) -> None:
    """All results: stage, key, size, age, where."""
    console = Console(as_json)

    def command() -> dict[str, Any]:
        entries = list(find_entries(root))
        rows = [("stage", "key", "standing", "size", "created", "where")]
        rows += [_row(entry) for entry in entries]
        console.result(table(rows) if entries else "There are no results here.")
        return {"artifacts": [_plain(entry) for entry in entries]}

    raise typer.Exit(run(console, command))


@commands.command("show")
def show_artifact(key: Key, root: Roots = None, as_json: AsJson = False) -> None:
    """One result's manifest: identity, inputs, files and facts."""
    console = Console(as_json)

    def command() -> dict[str, Any]:
        entry = _one(key, root)
        if entry.manifest is None:
            raise ArtifactError(f"{entry.path} is an unfinished attempt and has no manifest yet.")
        console.result(_described(entry))
        return {"manifest": entry.manifest}

    raise typer.Exit(run(console, command))


@commands.command("verify")
def verify_artifacts(
    key: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    root: Roots = None,
    as_json: AsJson = False,
) -> None:
    """Read every file again and compare it with its manifest; exit 1 if any differs."""
    console = Console(as_json)

    def command() -> dict[str, Any]:
        entries = [_one(key, root)] if key else [e for e in find_entries(root) if e.manifest]
        faults = [fault for entry in entries for fault in verify(entry)]
        if faults:
            raise ArtifactError(
                "\n".join(faults) + "\n  Restore these files, or build again with --force."
            )
        console.result(f"{len(entries)} results are whole.")
        return {"verified": [str(entry.path) for entry in entries]}

    raise typer.Exit(run(console, command))


@commands.command("prune")
def prune_artifacts(
    root: Roots = None,
    keep_last: Annotated[int, typer.Option(help="Keep this many newest of each stage.")] = 1,
    older_than: Annotated[float, typer.Option(help="Only what is older than this many days.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete old results of prepare, pack, export and push.

    Never what another result was made from, never a training run.
    """
    console = Console(as_json)

    def command() -> dict[str, Any]:
        doomed = choose_prunable(list(find_entries(root)), keep_last, older_than)
        freed = sum(entry.num_bytes for entry in doomed)
        for entry in doomed:
            console.result(f"{'would delete' if dry_run else 'deleted'} {entry.path}")
            if not dry_run:
                remove(entry.path)
                remove(lock_of(entry.path))
        console.result(f"{len(doomed)} results, {freed / 1e6:.1f} MB")
        return {"pruned": [str(entry.path) for entry in doomed], "bytes": freed}

    raise typer.Exit(run(console, command))


def find_entries(roots: list[Path] | None) -> Iterator[Entry]:
    """Every result below `roots`, or below the working directory, in order of path."""
    for missing in (root for root in roots or [] if not root.is_dir()):
        raise ConfigError(f"--root {missing} is not a folder.")
    for root in roots or [Path()]:
        for folder in sorted(_folders(root, SEARCH_DEPTH)):
            yield Entry(folder, read_manifest(folder))


def verify(entry: Entry) -> list[str]:
    """What in the folder disagrees with the manifest; empty when it is whole."""
    if entry.manifest is None:
        return [f"{entry.path}: no manifest"]
    faults: list[str] = []
    for file in entry.manifest["files"]:
        path = entry.path / file["path"]
        if not path.is_file():
            faults.append(f"{path}: missing")
        elif path.stat().st_size != file["bytes"]:
            faults.append(f"{path}: {path.stat().st_size} bytes, {file['bytes']} in the manifest")
        elif sha256_of(path) != file["sha256"]:
            faults.append(f"{path}: content differs from the manifest")
    return faults


def choose_prunable(entries: list[Entry], keep_last: int, older_than_days: float) -> list[Entry]:
    """Old sealed results that nothing else here was made from, oldest first."""
    needed = {key for entry in entries for key in entry.input_keys}
    now = datetime.now(UTC)
    chosen: list[Entry] = []
    for stage in ("prepare", "pack", "export", "push"):
        sealed = [e for e in entries if e.manifest and e.manifest["stage"] == stage]
        sealed.sort(key=lambda e: e.manifest["created"] if e.manifest else "", reverse=True)
        for entry in sealed[keep_last:]:
            assert entry.manifest
            age = now - datetime.fromisoformat(entry.manifest["created"])
            if entry.key not in needed and age.total_seconds() >= older_than_days * 86400:
                chosen.append(entry)
    return chosen


def _folders(root: Path, depth: int) -> Iterator[Path]:
    if _is_result(root):
        yield root
        return
    if depth:
        for child in root.iterdir():
            hidden = child.name.startswith(".") or child.name.endswith(REPLACED)
            if child.is_dir() and not child.is_symlink() and not hidden:
                yield from _folders(child, depth - 1)


def _is_result(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or (folder / ATTEMPT).is_file()


def _one(key: str, roots: list[Path] | None) -> Entry:
    if key and _is_result(Path(key)):
        return Entry(Path(key), read_manifest(Path(key)))
    found = [entry for entry in find_entries(roots) if entry.key.startswith(key)]
    if not found:
        raise ConfigError(f"no result's key starts with {key}.\n  See penstock artifacts list.")
    if len(found) > 1:
        which = ", ".join(str(entry.path) for entry in found)
        raise ConfigError(f"{len(found)} keys start with {key}: {which}.\n  Give more digits.")
    return found[0]


def _row(entry: Entry) -> tuple[str, ...]:
    manifest = entry.manifest
    stage = manifest["stage"] if manifest else entry.path.parent.name
    standing, created = ("sealed", manifest["created"]) if manifest else ("partial", "")
    size = f"{entry.num_bytes / 1e6:.1f} MB"
    return stage, entry.key[:8], standing, size, created, str(entry.path)


def _plain(entry: Entry) -> dict[str, Any]:
    stage, _, standing, _, created, where = _row(entry)
    return {
        "stage": stage,
        "key": entry.key,
        "standing": standing,
        "bytes": entry.num_bytes,
        "created": created or None,
        "path": where,
    }


def _described(entry: Entry) -> str:
    import yaml

    assert entry.manifest
    shown = {k: v for k, v in entry.manifest.items() if k != "files"}
    shown["files"] = len(entry.manifest["files"])
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip()
