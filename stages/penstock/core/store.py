"""The artifact store: a stage's folder is sealed by a manifest written last.

A folder without a manifest is an *attempt*: never read by another stage, handed back to the same
stage on the next run, so that it resumes instead of starting over. One writer per folder: a second
comer waits at the lock, finds the seal, and reuses. The kernel frees the lock when its holder dies.
"""

import errno
import platform
import shutil
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from penstock import __version__
from penstock.core import provenance
from penstock.core.depot import Depot
from penstock.core.digests import digests_of
from penstock.core.errors import ArtifactError, Interrupted, PenstockError, StageError
from penstock.core.files import PART, fsync, read_json, regular_files, remove, write_json
from penstock.core.follower import Follower
from penstock.core.reconcile import holds_a_record, reconcile
from penstock.core.stage import (
    ATTEMPT,
    ERROR_LOG,
    MANIFEST,
    Artifact,
    Facts,
    Source,
    Stage,
    identity,
    key_of,
    short,
)
from penstock.core.urls import scrubbed, spoken

FORMAT = 1

AT_ONCE = 16
"""Files that are flushed at once."""

REPLACED = ".replaced"
"""Suffix of a sealed folder while it is built again; gone once the new one is sealed."""

Status = Literal["ran", "cached", "resumed", "skipped"]
Cache = Literal["reuse", "refresh", "off"]
"""reuse: take what is sealed, resume what is not. refresh: build again, but resume an attempt of
this very build. off: build again from nothing."""


@dataclass(frozen=True)
class Step:
    """A stage and the folder its result lies in, or will."""

    stage: Stage
    path: Path
    remote: str | None = None
    """The URL the result is kept behind; `path` is its mirror on this machine then."""

    @property
    def where(self) -> str:
        """Where people look for the result."""
        return spoken(self.remote) if self.remote else str(self.path)

    @property
    def artifact(self) -> Artifact:
        """The result by name, whether or not it exists yet."""
        return Artifact(self.stage.name, key_of(self.stage), self.path)


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    stage: str
    key: str
    status: Status
    path: Path
    seconds: float
    facts: Facts
    remote: str | None = None

    @property
    def where(self) -> str:
        """Where people look for the result."""
        return spoken(self.remote) if self.remote else str(self.path)


def find(step: Step) -> dict[str, Any] | None:
    """The sealed manifest of the step, or None while there is none of this key.

    Raises ArtifactError when the seal is there but its files are not.
    """
    manifest = read_manifest(step.path)
    if manifest is None or manifest["key"] != key_of(step.stage):
        return None
    for file in manifest["files"]:
        path = step.path / file["path"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise ArtifactError(
                f"{step.path} is sealed, but {file['path']} is missing or not {file['bytes']} "
                f"bytes long.\n  Restore it, or build again with --force {step.stage.name}."
            )
    return manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in `folder`, or None where there is none. Raises ArtifactError if unreadable."""
    try:
        return read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise ArtifactError(
            f"{folder / MANIFEST} cannot be read: {reason_of(error)}.\n"
            f"  Delete {folder} to build it anew."
        ) from error


def realize(
    step: Step,
    *,
    cache: Cache = "reuse",
    claim: Callable[[Step], None] | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Return the step's result, doing the work only if it is not there yet.

    `claim` is called under the lock before any work; it may raise to refuse the folder or move what
    lies there aside. `notify` receives one line for people when this call has to wait.
    """
    started = time.monotonic()
    if step.remote:
        try:
            return _realize_there(step, Depot(step.remote, step.path), cache, claim, notify)
        except OSError as error:
            raise StageError(f"{step.path}, for {step.where}: {reason_of(error)}.") from error
    if cache == "reuse" and (manifest := find(step)):
        return _outcome(step, "cached", started, manifest["facts"])
    with _locked(step.path, notify):
        if cache == "reuse" and (manifest := find(step)):
            return _outcome(step, "cached", started, manifest["facts"])
        if claim:
            claim(step)
        if cache == "reuse":
            return _build(step, started)
        return _rebuild(step, started, cache)


def lookup(step: Step) -> dict[str, Any] | None:
    """The sealed manifest of the step wherever it is kept, or None; nothing is fetched."""
    if step.remote is None:
        return find(step)
    there = Depot(step.remote, step.path).manifest()
    return there if there and there["key"] == key_of(step.stage) else None


def obtain(step: Step, notify: Callable[[str], None] = lambda _: None) -> dict[str, Any] | None:
    """As `find`, after fetching what is sealed behind a URL and not on this machine."""
    if step.remote is None:
        return find(step)
    with _locked(step.path, notify):
        return _obtained(step, Depot(step.remote, step.path))


def _realize_there(
    step: Step,
    depot: Depot,
    cache: Cache,
    claim: Callable[[Step], None] | None,
    notify: Callable[[str], None],
) -> Outcome:
    """Realize a step that is kept behind a URL: one machine builds, and the others fetch."""
    started = time.monotonic()
    with _locked(step.path, notify):
        if cache == "reuse" and (manifest := _obtained(step, depot)):
            return _outcome(step, "cached", started, manifest["facts"])
        lease = depot.lease()
        if not lease.take(lambda: cache == "reuse" and lookup(step) is not None, notify):
            manifest = _obtained(step, depot)
            assert manifest, "sealed a moment ago"
            return _outcome(step, "cached", started, manifest["facts"])
        with lease:
            if cache == "reuse" and (manifest := _obtained(step, depot)):
                lease.clear()
                return _outcome(step, "cached", started, manifest["facts"])
            outcome = _build_for(step, depot, cache, claim, notify)
            manifest = read_manifest(step.path)
            assert manifest, "sealed here"
            depot.publish(manifest, lease)
            if not step.stage.keepsakes(step.path):
                depot.tidy(manifest)
            return outcome


def _build_for(
    step: Step,
    depot: Depot,
    cache: Cache,
    claim: Callable[[Step], None] | None,
    notify: Callable[[str], None],
) -> Outcome:
    """Build in the mirror, unless an earlier run did and only could not send it."""
    started = time.monotonic()
    if cache == "reuse" and (manifest := _whole(step)):
        return _outcome(step, "cached", started, manifest["facts"])
    held = reconcile(depot, step.stage)
    if claim:
        claim(step)
    if held not in (None, key_of(step.stage)) and not holds_a_record(depot):
        depot.set_aside()
    with Follower(depot, step.stage, notify):
        if cache == "reuse":
            return _build(step, started)
        return _rebuild(step, started, cache)


def _obtained(step: Step, depot: Depot) -> dict[str, Any] | None:
    """The manifest, if the result is sealed behind the URL; its files are here then, and whole."""
    there = depot.manifest()
    if there is None or there["key"] != key_of(step.stage):
        return None
    here = _whole(step)
    if here is None or here["files"] != there["files"]:
        depot.fetch(there)
        if not step.stage.keepsakes(step.path):
            listed = {step.path / file["path"] for file in there["files"]} | {step.path / MANIFEST}
            for path in regular_files(step.path):
                if path not in listed:
                    path.unlink()
    return there


def _whole(step: Step) -> dict[str, Any] | None:
    """As `find`; a mirror that lacks files is no fault, for they can be had again."""
    try:
        return find(step)
    except ArtifactError:
        return None


def lock_of(folder: Path) -> Path:
    """The lock file of an artifact's folder: beside it, hidden."""
    return folder.with_name(f".{folder.name}.lock")


class _locked:  # noqa: N801 - used as a function
    """One writer per folder; says so once when another holds it."""

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StageError(f"{folder.parent} cannot be created: {reason_of(error)}.") from error
        self._lock = FileLock(lock_of(folder))
        self._folder = folder
        self._notify = notify

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._notify(f"{self._folder} is being built by another run; waiting for it")
            self._lock.acquire()
        except OSError as error:
            raise StageError(f"{self._folder} cannot be locked: {reason_of(error)}.") from error

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _rebuild(step: Step, started: float, cache: Cache) -> Outcome:
    """Build although a result may be there; that result survives until the new one is whole."""
    had = read_manifest(step.path) is not None
    aside = step.path.with_name(f"{step.path.name}{REPLACED}")
    if had:
        remove(aside)
    if had or (cache == "off" and step.path.exists() and not aside.exists()):
        step.path.rename(aside)
    elif cache == "off":
        remove(step.path)
    try:
        return _build(step, started)
    except BaseException:
        if had:
            remove(step.path)
            aside.rename(step.path)
        raise


def _build(step: Step, started: float) -> Outcome:
    stage, out = step.stage, step.path
    resumed = (out / ATTEMPT).is_file()
    began = time.monotonic()
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / ATTEMPT, {**identity(stage), "key": key_of(stage)})
        facts = dict(stage.run(out))
        manifest = _seal(step, facts, time.monotonic() - began)
        remove(out.with_name(f"{out.name}{REPLACED}"))
    except Interrupted:
        raise
    except Exception as error:
        raise _failure(step, error, time.monotonic() - began) from error
    return _outcome(step, "resumed" if resumed else "ran", started, manifest["facts"])


def _seal(step: Step, facts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Sweep what is unfinished, digest what is owned, and write the manifest last."""
    stage, out = step.stage, step.path
    for leftover in regular_files(out):
        if leftover.suffix == PART:
            leftover.unlink()
    owned = sorted(stage.owned_files(out))
    with ThreadPoolExecutor(AT_ONCE) as pool:  # together they cost little more than one
        list(pool.map(fsync, owned))
    # A file that is a link of one known already is not read again.
    files = [
        {"path": path.relative_to(out).as_posix(), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(owned, digests_of(owned), strict=True)
    ]
    manifest = {
        "format": FORMAT,
        "stage": stage.name,
        "key": key_of(stage),
        "version": stage.version,
        "settings": identity(stage)["settings"],
        "inputs": {
            name: {"key": source.key, "source": dict(source.pin)}
            if isinstance(source, Source)
            else {"key": source.key}
            for name, source in stage.inputs.items()
        },
        "files": files,
        "facts": facts,
        "seconds": round(seconds, 3),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": {"penstock": __version__, **provenance.versions()},
        "host": platform.node(),
    }
    write_json(out / MANIFEST, manifest)
    for mark in (ATTEMPT, ERROR_LOG):
        (out / mark).unlink(missing_ok=True)
    return manifest


def _failure(step: Step, error: Exception, seconds: float) -> PenstockError:
    """The error a user sees; the traceback goes to the attempt's log."""
    log = step.path / ERROR_LOG
    with suppress(OSError):
        log.write_text(scrubbed("".join(traceback.format_exception(error))))
    mirror = f", for {step.where}" if step.remote else ""
    kept = f"What it wrote is kept in {step.path}{mirror}; run it again to resume."
    text = str(error) if isinstance(error, PenstockError) else reason_of(error)
    failure = StageError(f"{step.stage.name} failed after {seconds:.0f}s: {text}\n  {kept}")
    if isinstance(error, PenstockError):
        failure.exit_code = error.exit_code if error.exit_code != 2 else 1
    return failure


def reason_of(error: BaseException) -> str:
    """One sentence for an exception that was not written for users."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk is full{where}; free some space{_free_space(error)}"
        return f"{error.strerror.lower()}{where}"
    return f"{type(error).__name__}: {error}"


def _free_space(error: OSError) -> str:
    if not error.filename:
        return ""
    with suppress(OSError):
        free = shutil.disk_usage(Path(str(error.filename)).parent).free
        return f" ({free / 1e6:.1f} MB are left there)"
    return ""


def _outcome(step: Step, status: Status, started: float, facts: Facts) -> Outcome:
    seconds = time.monotonic() - started
    key = short(key_of(step.stage))
    return Outcome(step.stage.name, key, status, step.path, seconds, facts, step.remote)
