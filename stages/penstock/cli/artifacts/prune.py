"""`penstock artifacts prune`: finds results that are no longer needed and deletes them.

Needed are inputs of other results and of releases (also a composed model, which is one by its
content), results that a running process has pinned
(`penstock.core.cache.in_use`), the export that `hf` or `adapter` in a run's folder links to, and
every training run. Pins and links are checked again before each deletion, while new pins are
blocked.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from penstock.cli.artifacts.entries import Entry, LocalEntry, is_result
from penstock.cli.console import Console
from penstock.core.cache.in_use import block_new_pins, pinned_keys
from penstock.core.errors import ConfigError
from penstock.core.files import read_json, remove
from penstock.core.replace_folder import finish_deletions
from penstock.encode.stage import FEATURES
from penstock.export.links import find_links, forget_links
from penstock.prepare.stage import SLICES

PRUNABLE = ("compose", "prepare", "encode", "pack", "reference", "export", "push")
DAY = 86_400.0
MAX_CLOCK_SKEW = timedelta(minutes=5)
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY, "w": 7 * DAY, "": DAY}
AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")

Reach = Literal["leaves", "chains"]
"""leaves: results that are no input of another result. chains: also inputs that only deleted
results were made from."""


def parse_age(text: str) -> float:
    """Seconds in `30d`, `12h`, `45m`, `2w`, or in a number of days. Raises ConfigError."""
    match = AGE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(
            f"--older-than {text} is no age.\n  Write one such as 30d, 12h, 45m or 2w."
        )
    return float(match[1]) * UNITS[match[2]]


def prune(
    entries: list[Entry],
    chosen: list[Entry],
    caches: list[Path],
    older_than: float,
    console: Console,
    *,
    dry_run: bool,
) -> dict[str, Any]:
    """Delete the results `chosen` that are not in use by now, and then unused files older than
    `older_than` seconds in `caches`, the folders of slices and features; with `dry_run` only print
    them.
    """
    verb = "would delete" if dry_run else "deleted"
    pruned: list[Entry] = []
    freed = 0
    cached = {SLICES: 0, FEATURES: 0}
    for folder in {entry.folder.parent for entry in entries if not dry_run}:
        # What a killed prune has renamed and not deleted is in no list of results.
        finish_deletions(folder)
    for entry in chosen:
        size = entry.num_bytes
        if dry_run or _delete_if_unused(entry):
            pruned.append(entry)
            freed += size
            console.result(f"{verb} {entry.where}")
    remaining = [entry for entry in entries if entry not in pruned]
    for cache in caches:
        root = cache.parent
        # A dry run takes no lock, for which it would need to write.
        looking = nullcontext(partial(pinned_keys, root)) if dry_run else block_new_pins(root)
        with looking as marked:
            if marked():  # a run whose data is not complete yet may be about to read them
                console.say(f"{cache} is skipped: a run is using it")
                continue
            find = _unused_slices if cache.name == SLICES else _unused_features
            for files in find(cache, remaining, pruned if dry_run else [], older_than):
                cached[cache.name] += 1
                freed += sum(file.stat().st_size for file in files)
                for file in () if dry_run else files:
                    remove(file)
    if cached[SLICES]:
        console.result(f"{verb} {cached[SLICES]} cached slices")
    if cached[FEATURES]:
        console.result(f"{verb} {cached[FEATURES]} files of image features")
    console.result(f"{len(pruned)} results, {cached[SLICES]} slices, {freed / 1e6:.1f} MB")
    return {"pruned": [entry.where for entry in pruned], **cached, "bytes": freed}


def choose_prunable(
    entries: list[Entry], keep_last: int, older_than: float, reach: Reach = "leaves"
) -> list[Entry]:
    """Complete results older than `older_than` seconds that are not needed, without the newest
    `keep_last` of each stage; the oldest last.

    A result from the future, written while the clock was wrong, is not chosen and does not count as
    one of the newest.
    """
    now = datetime.now(UTC)
    # Texts of ISO 8601 in UTC, to the second, sort as the times do.
    latest = (now + MAX_CLOCK_SKEW).isoformat(timespec="seconds")
    marked = {key for root in {entry.root for entry in entries} for key in pinned_keys(root)}
    candidates: list[Entry] = []
    for stage in PRUNABLE:
        complete = [
            entry
            for entry in entries
            if entry.manifest and entry.manifest["stage"] == stage and _created(entry) <= latest
        ]
        complete.sort(key=_created, reverse=True)
        candidates += [
            entry
            for entry in complete[keep_last:]
            if entry.key not in marked
            and not find_links(entry.folder)
            and (now - datetime.fromisoformat(_created(entry))).total_seconds() >= older_than
        ]
    if reach == "leaves":
        needed = {key for entry in entries for key in entry.input_keys}
    else:
        needed = _collect_input_keys(
            [entry for entry in entries if entry not in candidates], entries
        )
    return [entry for entry in candidates if needed.isdisjoint(entry.keys)]


def find_caches(root: Path, depth: int) -> Iterator[Path]:
    """Folders named `slices` that contain cached slices, and `features` with those of images."""
    held = _CACHED.get(root.name)
    if held and any(held.fullmatch(child.name) for child in root.iterdir()):
        yield root
        return
    if depth and not is_result(root):
        for child in root.iterdir():
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from find_caches(child, depth - 1)


_CACHED = {
    SLICES: re.compile(r"[0-9a-f]{16}\.(arrow|json|.+\.part)"),
    FEATURES: re.compile(r"[0-9a-f]{16}"),
}
"""Names of what the folders of caches contain."""


def _collect_input_keys(remaining: list[Entry], entries: list[Entry]) -> set[str]:
    """Keys of all direct and indirect inputs of the results `remaining`."""
    by_key = {key: entry for entry in entries for key in entry.keys}
    keys: set[str] = set()
    ahead = {key for entry in remaining for key in entry.input_keys}
    while ahead:
        keys |= ahead
        present = [by_key[key] for key in ahead if key in by_key]
        ahead = {key for entry in present for key in entry.input_keys} - keys
    return keys


def _created(entry: Entry) -> str:
    return entry.manifest["created"] if entry.manifest else ""


def _delete_if_unused(entry: Entry) -> bool:
    """Delete it, unless a run uses it by now."""
    with block_new_pins(entry.root) as marked:
        if entry.key in marked() or find_links(entry.folder):
            return False
        entry.delete()
        forget_links(entry.folder)
        return True


def _unused_slices(
    cache: Path, remaining: list[Entry], going: list[Entry], older_than: float
) -> Iterator[list[Path]]:
    """The files of each cached slice, and of the images of each, that no kept result uses."""
    from penstock.core.cache.noted_files import prunable
    from penstock.media.originals import ORIGINALS, prunable_originals
    from penstock.rows.image_files import MEDIA, ImageFiles
    from penstock.rows.prepared import PLAN

    used: set[str] = set()
    media: set[str] = set()
    for entry in remaining:
        if isinstance(entry, LocalEntry) and entry.stage == "prepare":
            with suppress(FileNotFoundError, KeyError, TypeError):
                for item in read_json(entry.path / PLAN)["slices"]:
                    used.add(item["key"])
                    media.update(item["tally"].get("media", ()))
    paths = [entry.path for entry in going if isinstance(entry, LocalEntry)]
    yield from prunable(cache, used, older_than=older_than, going=paths)
    images = {*(cache / MEDIA).glob("*/*.arrow")}
    for folder in sorted((cache / MEDIA).glob("*")):
        media_names = {
            name.rpartition("/")[2] for name in media if name.startswith(f"{folder.name}/")
        }
        for files in prunable(folder, media_names, older_than=older_than, going=paths):
            images.difference_update(files)
            yield files
    digests = {
        digest for file in images if file.is_file() for digest in ImageFiles([file]).digests()
    }
    yield from prunable_originals(cache / MEDIA / ORIGINALS, digests, older_than)


def _unused_features(
    cache: Path, remaining: list[Entry], going: list[Entry], older_than: float
) -> Iterator[list[Path]]:
    """The files of features of images that no result has a link to, or a copy of."""
    from penstock.core.cache.noted_files import prunable
    from penstock.rows.image_files import MEDIA

    copied = {
        file.stem
        for entry in remaining
        if isinstance(entry, LocalEntry) and entry.stage in ("encode", "pack")
        for file in (entry.path / MEDIA).glob("*.arrow")
        # A hard link is counted by `prunable`; a copy, made across file systems, is not.
        if file.stat().st_nlink == 1
    }
    paths = [entry.path for entry in going if isinstance(entry, LocalEntry)]
    for folder in sorted(entry for entry in cache.iterdir() if entry.is_dir()):
        yield from prunable(folder, copied, older_than=older_than, going=paths)
