"""The artifact store. A manifest, written last, is the commit marker of an artifact folder.

A folder without a manifest is an *attempt*: other stages never read it, and the same stage resumes
it on the next run. There is one writer per folder: a second process waits for the lock, finds the
manifest, and reuses the result. The kernel releases the lock when its holder dies.
"""

import platform
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from filelock import Timeout

from penstock.core.cache import provenance
from penstock.core.cache.attempt_files import require_unchanged
from penstock.core.cache.digest_cache import digest_files
from penstock.core.cache.input_digests import (
    attempt_record,
    changed_inputs,
    digests_of_inputs,
    read_attempt,
)
from penstock.core.cache.manifest import MANIFEST, content_digest, read_manifest, remedy_for
from penstock.core.cache.record import FORMAT, Record, write_record
from penstock.core.cache.stage import (
    ATTEMPT,
    ERROR_LOG,
    Artifact,
    Facts,
    Source,
    Stage,
    identity,
    short,
    stage_key,
)
from penstock.core.cache.verify import Verify, require_content, require_sizes
from penstock.core.errors import (
    ArtifactError,
    ConfigError,
    Interrupted,
    PenstockError,
    StageError,
)
from penstock.core.file_lock import acquire_lock
from penstock.core.files import PART, backup_rename, fsync, regular_files, remove
from penstock.core.os_errors import describe_os_error
from penstock.core.remote.artifact_sync import BackgroundUploader, RemoteArtifact
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.urls import is_url, redact, redact_text, url_join
from penstock.core.replace_folder import replace_folder
from penstock.core.sources.unchanged import pinned_files
from penstock.core.sources.unchanged import require_unchanged as require_unchanged_sources
from penstock.version import __version__

MAX_CONCURRENT_FLUSHES = 16  # Number of files flushed concurrently

REPLACED = ".replaced"
"""Suffix of a complete folder during a rebuild; removed once the new result is complete."""

Notify = Callable[[str], None]

Status = Literal["ran", "cached", "resumed", "skipped"]
Cache = Literal["reuse", "refresh", "off"]
"""reuse: use complete results and resume incomplete ones. refresh: rebuild, but resume an attempt
of this rebuild. off: rebuild from scratch."""


WAIT_SECONDS = 1.0  # Interval at which a waiting run looks at what the other one builds


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class PlannedStage:
    """A stage and the folder of its result."""

    stage: Stage
    path: Path
    remote: str | None = None  # The URL of a remote result; `path` is then its local mirror

    @classmethod
    def in_root(cls, stage: Stage, root: str) -> "PlannedStage":
        """The step whose result is `<name>/<key>` in `root`, a local folder or a URL."""
        below = (stage.name, short(stage_key(stage)))
        remote = url_join(root, *below) if is_url(root) else None
        return cls(stage, local_cache_dir(root).joinpath(*below), remote)

    @property
    def where(self) -> str:
        return redact(self.remote) if self.remote else str(self.path)

    @property
    def artifact(self) -> Artifact:
        return Artifact(self.stage.name, stage_key(self.stage), self.path, self.remote)


@dataclass(frozen=True)
class StageResult:
    """The outcome of a step."""

    stage: str
    key: str
    status: Status
    path: Path
    seconds: float
    facts: Facts
    remote: str | None = None

    @property
    def where(self) -> str:
        """The location shown to users."""
        return redact(self.remote) if self.remote else str(self.path)


def find_local(step: PlannedStage) -> Record | None:
    """Return the step's manifest, or None if there is no complete result with this key.

    Raises ArtifactError if listed files are missing or have other sizes, or if the manifest belongs
    to another folder.
    """
    manifest, key = read_manifest(step.path), stage_key(step.stage)
    if manifest is None:
        return None
    if manifest["key"] != key:
        if step.path.name == short(key):
            raise ArtifactError(
                f"{step.path / MANIFEST} is damaged: it belongs to {manifest.get('stage')} "
                f"{short(manifest['key'])}.\n  {remedy_for(step.path)}"
            )
        return None
    require_sizes(step.path, manifest)
    return manifest


def get_or_build(
    step: PlannedStage,
    *,
    cache: Cache = "reuse",
    verify: Verify = "changed",
    claim: Callable[[PlannedStage], None] | None = None,
    notify: Notify = _silent,
) -> StageResult:
    """Return the step's result; build it only if it is missing or stale.

    An existing result is verified according to `verify`. `claim` is called under the lock before
    any work; it may raise to reject the folder, or move existing files aside. `notify` receives one
    log line if this call has to wait or rebuilds an existing result.

    Raises ArtifactError for a damaged result.
    """
    started = time.monotonic()
    request = _Request(cache, verify, claim, notify)
    if step.remote:
        try:
            return _get_or_build_remote(step, RemoteArtifact(step.remote, step.path), request)
        except OSError as error:
            raise StageError(
                f"{step.path}, for {step.where}: {describe_os_error(error)}."
            ) from error
    # Without the lock, which needs a folder that can be written to: results may be on a read-only
    # mount.
    if cache == "reuse" and (manifest := _find_intact(step, verify)):
        return _stage_result(step, "cached", started, manifest["facts"])
    with _folder_lock(step, notify):
        # Another process may have completed it while this one waited for the lock.
        if cache == "reuse" and (manifest := _find_intact(step, verify, notify)):
            return _stage_result(step, "cached", started, manifest["facts"])
        if claim:
            claim(step)
        return _build_or_rebuild(step, started, request)


def find_cached(step: PlannedStage) -> Record | None:
    """Return the step's local or remote manifest, or None. Downloads no files. Also None if the
    result is stale, as far as local inputs show."""
    manifest = find_complete(step)
    if manifest and changed_inputs(step.stage, manifest, digests_of_inputs(step.stage, "local")):
        return None
    return manifest


def find_complete(step: PlannedStage) -> Record | None:
    """Return the step's local or remote manifest, stale or not, or None."""
    if step.remote is None:
        return find_local(step)
    return _remote_manifest(step, RemoteArtifact(step.remote, step.path))


def fetch_cached(
    step: PlannedStage, verify: Verify = "changed", notify: Notify = _silent
) -> Record | None:
    """Return the manifest after downloading a remote result that is missing on this machine and
    verifying its files. None if there is no result or it is stale."""
    if step.remote is None:
        return _find_intact(step, verify)
    with _folder_lock(step, notify):
        return _fetch_current(step, RemoteArtifact(step.remote, step.path), verify, notify)


@dataclass(frozen=True)
class _Request:
    cache: Cache
    verify: Verify
    claim: Callable[[PlannedStage], None] | None
    notify: Notify


def _find_intact(step: PlannedStage, verify: Verify, notify: Notify = _silent) -> Record | None:
    """The manifest of a complete and current result. Raises ArtifactError if it is damaged."""
    manifest = find_local(step)
    if manifest is None or not _is_current(step, manifest, notify):
        return None
    require_content(step.path, manifest, verify)
    return manifest


def _remote_manifest(step: PlannedStage, remote: RemoteArtifact) -> Record | None:
    manifest = remote.manifest()
    return manifest if manifest and manifest["key"] == stage_key(step.stage) else None


def _is_current(step: PlannedStage, manifest: Record, notify: Notify = _silent) -> bool:
    changed = [*map(str, changed_inputs(step.stage, manifest, digests_of_inputs(step.stage)))]
    changed = changed or step.stage.outside_changes()
    if changed:
        notify(f"{step.stage.name} is stale and is built again: {'; '.join(changed)}")
    return not changed


def _build_or_rebuild(step: PlannedStage, started: float, request: _Request) -> StageResult:
    if request.cache != "reuse" or (step.path / MANIFEST).is_file():
        return _rebuild(step, started, request)
    return _build(step, started, request)


def _get_or_build_remote(
    step: PlannedStage, remote: RemoteArtifact, request: _Request
) -> StageResult:
    started = time.monotonic()
    notify = request.notify

    def fetch() -> Record | None:
        if request.cache != "reuse":
            return None
        return _fetch_current(step, remote, request.verify, notify)

    def is_done() -> bool:
        manifest = _remote_manifest(step, remote) if request.cache == "reuse" else None
        # Without notify, as it is asked again and again while another machine builds.
        return manifest is not None and _is_current(step, manifest)

    with _folder_lock(step, notify):
        if manifest := fetch():
            return _stage_result(step, "cached", started, manifest["facts"])
        lease = remote.lease()
        if not lease.acquire(is_done, notify):
            manifest = fetch()
            assert manifest, "lease.acquire found it complete"
            return _stage_result(step, "cached", started, manifest["facts"])
        with lease:
            # Another machine may have published it between the check above and the lease.
            if manifest := fetch():
                lease.clear()
                return _stage_result(step, "cached", started, manifest["facts"])
            outcome = _build_in_mirror(step, remote, request)
            manifest = read_manifest(step.path)
            assert manifest, "just written"
            remote.publish(manifest, lease)
            if not step.stage.files_to_upload(step.path):
                remote.delete_unlisted(manifest)
            return outcome


def _build_in_mirror(step: PlannedStage, remote: RemoteArtifact, request: _Request) -> StageResult:
    # An earlier run may have completed the build when only its upload failed.
    started = time.monotonic()
    if request.cache == "reuse" and (
        manifest := _find_intact_mirror(step, request.verify, request.notify)
    ):
        return _stage_result(step, "cached", started, manifest["facts"])
    remote_key = remote.sync_mirror(step.stage)
    if request.claim:
        request.claim(step)
    if remote_key not in (None, stage_key(step.stage)) and not remote.mirror_key():
        remote.move_to_backup()
    with BackgroundUploader(remote, step.stage, request.notify):
        return _build_or_rebuild(step, started, request)


def _fetch_current(
    step: PlannedStage, remote: RemoteArtifact, verify: Verify, notify: Notify
) -> Record | None:
    """Return the manifest if the remote result is complete and current, after downloading and
    verifying its files."""
    manifest = _remote_manifest(step, remote)
    if manifest is None or not _is_current(step, manifest, notify):
        return None
    mirror = _find_intact_mirror(step, verify, notify)
    if mirror is None or mirror["files"] != manifest["files"]:
        remote.fetch(manifest)
        if not step.stage.files_to_upload(step.path):
            listed = {step.path / file["path"] for file in manifest["files"]}
            for path in set(regular_files(step.path)) - listed - {step.path / MANIFEST}:
                path.unlink()
    return manifest


def _find_intact_mirror(step: PlannedStage, verify: Verify, notify: Notify) -> Record | None:
    # Damage in a mirror is no error: its files can be downloaded again.
    try:
        return _find_intact(step, verify)
    except ArtifactError as error:
        first = str(error).split("\n", 1)[0].rstrip(":.")
        notify(f"{first}; it is a copy of {step.where}, and is fetched or built again")
        return None


def lock_path(folder: Path) -> Path:
    """The lock file of an artifact folder: a hidden file in the parent folder."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def _folder_lock(step: PlannedStage, notify: Notify) -> Generator[None]:
    try:
        step.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StageError(
            f"{step.path.parent} cannot be created: {describe_os_error(error)}."
        ) from error
    try:
        lock = acquire_lock(lock_path(step.path), timeout=0)
    except Timeout:
        notify(f"{step.path} is being built by another run; waiting for it")
        lock = _wait_for_lock(step)
    with lock:
        yield


def _wait_for_lock(step: PlannedStage) -> AbstractContextManager[object]:
    own_key = stage_key(step.stage)
    while True:
        with suppress(Timeout):
            return acquire_lock(lock_path(step.path), timeout=WAIT_SECONDS)
        attempt = read_attempt(step.path)
        if attempt is not None and attempt["key"] != own_key:
            raise ConfigError(
                f"{step.where} is being written by another run with other settings: key "
                f"{short(attempt['key'])} there, {short(own_key)} here.\n"
                "  Name another folder (train.output_dir), or wait until that run has ended."
            )


def _rebuild(step: PlannedStage, started: float, request: _Request) -> StageResult:
    # The existing result is kept until the new one is complete, and restored if the build fails,
    # unless it is stale.
    had_result = (step.path / MANIFEST).exists()
    from_scratch = request.cache == "off"
    aside = step.path.with_name(f"{step.path.name}{REPLACED}")
    # A rebuild that died between the manifest and the removal of `aside` leaves both complete.
    if had_result:
        remove(aside)
    if had_result or (from_scratch and step.path.exists() and not aside.exists()):
        step.path.rename(aside)
    # `aside` holds the last complete result; only the attempt of an interrupted rebuild goes.
    elif from_scratch:
        remove(step.path)
    restores_previous = request.cache != "reuse" and (aside / MANIFEST).is_file()
    try:
        return _build(step, started, request, restores_previous=restores_previous)
    # The attempt stays in place for the next run, which finds the previous result in `aside`.
    except Interrupted:
        raise
    except Exception:
        if restores_previous:
            failed = step.path.with_name(f"{step.path.name}.failed{PART}")
            if attempt := replace_folder(aside, step.path, failed):
                remove(attempt)
        raise


def _build(
    step: PlannedStage,
    started: float,
    request: _Request,
    *,
    restores_previous: bool = False,
) -> StageResult:
    """Run the stage, or resume its attempt. `started` is when the call began, which may have waited
    for a lock. `restores_previous`: the caller restores a result if this fails, as the error says.
    """
    stage, out = step.stage, step.path
    build_started = time.monotonic()
    try:
        digests = digests_of_inputs(stage)
        resumed = _find_attempt_to_resume(step, digests, request.notify)
        out.mkdir(parents=True, exist_ok=True)
        write_record(out / ATTEMPT, attempt_record(stage, digests))
        # Before and after: content that changes while the stage reads it would be in the result but
        # not in its key.
        _require_unchanged_inputs(stage, digests, request.verify)
        facts = dict(stage.run(out))
        _require_unchanged_inputs(stage, digests, request.verify)
        manifest = _seal(step, facts, digests, time.monotonic() - build_started)
        remove(out.with_name(f"{out.name}{REPLACED}"))
    except Interrupted:
        raise
    except Exception as error:
        seconds = time.monotonic() - build_started
        raise _failure(step, error, seconds, restores_previous=restores_previous) from error
    return _stage_result(step, "resumed" if resumed else "ran", started, manifest["facts"])


def _require_unchanged_inputs(stage: Stage, digests: Mapping[str, str], verify: Verify) -> None:
    """Raise StageError or ArtifactError if sources are no longer what they were when they were
    pinned, or artifacts have other files than their manifest or another manifest than before.

    Artifacts may be gone: their files are memory-mapped.
    """
    if not stage.verifies_sources:
        sources = [source for source in stage.inputs.values() if isinstance(source, Source)]
        require_unchanged_sources(pinned_files(sources))
    for name, digest in digests.items():
        artifact = stage.inputs[name]
        assert isinstance(artifact, Artifact)
        if manifest := read_manifest(artifact.path):
            require_content(artifact.path, manifest, "off" if verify == "off" else "changed")
            if content_digest(manifest) != digest:
                raise StageError(
                    f"{artifact.path}, the {name} input, was built again with other content while "
                    "it was read.\n  Run again."
                )


def _find_attempt_to_resume(step: PlannedStage, digests: dict[str, str], notify: Notify) -> bool:
    attempt = read_attempt(step.path)
    if attempt is None:
        return False
    if attempt["key"] != stage_key(step.stage):  # The `claim` callback accepted the folder.
        return True
    if changed := changed_inputs(step.stage, attempt, digests):
        aside = backup_rename(step.path)
        notify(
            f"{step.stage.name}: the incomplete result was built from other input "
            f"({'; '.join(map(str, changed))}); it was moved to {aside}"
        )
        return False
    return True


def _seal(step: PlannedStage, facts: Record, digests: dict[str, str], seconds: float) -> Record:
    """Remove temporary files, digest the owned files, and write the manifest last. `digests` are
    the content digests of the inputs, taken before the stage read them."""
    stage, out = step.stage, step.path
    owned = sorted(stage.owned_files(out))
    # After a power failure, a manifest must not name files whose blocks never reached the disk.
    # Concurrent flushes cost little more than one flush.
    with ThreadPoolExecutor(MAX_CONCURRENT_FLUSHES) as pool:
        list(pool.map(fsync, owned))
    # Hard links of already digested files are not read again.
    digested = list(zip(owned, digest_files(owned), strict=True))
    require_unchanged(digested)
    files = [
        {"path": path.relative_to(out).as_posix(), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in digested
    ]
    for leftover in regular_files(out):
        if leftover.suffix == PART:
            leftover.unlink()
    inputs: dict[str, Record] = {}
    for name, source in stage.inputs.items():
        inputs[name] = {"key": source.key}
        if isinstance(source, Source):
            inputs[name]["source"] = dict(source.pin)
        elif digests.get(name):
            inputs[name]["digest"] = digests[name]
    manifest = {
        "format": FORMAT,
        "stage": stage.name,
        "key": stage_key(stage),
        "version": stage.version,
        "settings": identity(stage)["settings"],
        "inputs": inputs,
        "files": files,
        "facts": facts,
        "seconds": round(seconds, 3),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": {"penstock": __version__, **provenance.versions()},
        "host": platform.node(),
    }
    write_record(out / MANIFEST, manifest)
    # After the manifest: a crash in between leaves a complete folder, with a mark that is not read.
    for mark in (ATTEMPT, ERROR_LOG):
        (out / mark).unlink(missing_ok=True)
    return manifest


def _failure(
    step: PlannedStage, error: Exception, seconds: float, *, restores_previous: bool
) -> PenstockError:
    """The error shown to users; the traceback is written to the attempt's log."""
    log = step.path / ERROR_LOG
    with suppress(OSError):
        log.write_text(redact_text("".join(traceback.format_exception(error))), encoding="utf-8")
    mirror = f", for {step.where}" if step.remote else ""
    advice = f"What it wrote is kept in {step.path}{mirror}; run it again to resume."
    if restores_previous:
        advice = f"The previous result was restored in {step.path}{mirror}."
    text = str(error) if isinstance(error, PenstockError) else describe_os_error(error, step.path)
    failure = StageError(f"{step.stage.name} failed after {seconds:.0f}s: {text}\n  {advice}")
    if isinstance(error, PenstockError):
        # 2 means that nothing has started, which is not so here.
        failure.exit_code = error.exit_code if error.exit_code != 2 else 1
    return failure


def _stage_result(step: PlannedStage, status: Status, started: float, facts: Facts) -> StageResult:
    seconds = time.monotonic() - started
    key = short(stage_key(step.stage))
    return StageResult(step.stage.name, key, status, step.path, seconds, facts, step.remote)
