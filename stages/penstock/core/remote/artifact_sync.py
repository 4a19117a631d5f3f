"""Upload and download of artifacts; the manifest is uploaded last and files are verified.

Uploaded files are recorded beside the mirror folder with the version that the store returned, so
that an interrupted upload resumes and no file is sent twice. The remote artifact is authoritative:
its mirror may be older, or belong to another run.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.core.cache.digest_cache import sha256_file
from penstock.core.cache.input_digests import changed_inputs, digests_of_inputs, read_attempt
from penstock.core.cache.manifest import MANIFEST, parse_manifest, read_manifest
from penstock.core.cache.record import parse_record
from penstock.core.cache.stage import ATTEMPT, ERROR_LOG, Stage, stage_key
from penstock.core.errors import ArtifactError, PenstockError
from penstock.core.files import atomic_write, backup_rename, read_json, remove, write_json
from penstock.core.remote.lease import LEASES, Lease
from penstock.core.remote.local_mirror import mirror_holder
from penstock.core.remote.open import open_file
from penstock.core.remote.path import RemotePath
from penstock.core.remote.urls import split_parent
from penstock.core.remote.version import content_version

MAX_CONCURRENT_TRANSFERS = 8

CHUNK = 4 << 20

INTERVAL = 2.0  # Seconds between scans for files to upload while a stage runs

Item = TypeVar("Item")


def transfer(call: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call `call` with each item, several at a time; raise the first error once all have ended."""
    with ThreadPoolExecutor(MAX_CONCURRENT_TRANSFERS) as pool:
        for job in [pool.submit(call, item) for item in items]:
            job.result()


class RemoteArtifact:
    """A remote artifact and the local folder that mirrors it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.root = RemotePath.from_url(url)
        self.folder = folder
        self._sent_file = folder.with_name(f".{folder.name}.sent.json")
        self._sent: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):
            # Files whose notes cannot be read are uploaded again.
            self._sent = {name: dict(note) for name, note in read_json(self._sent_file).items()}
        self._sent_by_this_run: dict[str, dict[str, Any]] = {}
        self._writing = threading.Lock()

    def lease(self) -> Lease:
        return Lease(self.root, mirror_holder())

    def manifest(self) -> dict[str, Any] | None:
        """The remote manifest, or None. Raises ArtifactError if it is damaged."""
        return self._record(MANIFEST)

    def attempt(self) -> dict[str, Any] | None:
        return self._record(ATTEMPT)

    def publish(self, manifest: dict[str, Any], lease: Lease) -> None:
        """Upload the files that the manifest lists, then the manifest. An existing one is deleted
        first, so that no manifest exists before its files."""
        (self.root / MANIFEST).delete()
        self._sent_by_this_run = {}
        self.send([str(file["path"]) for file in manifest["files"]])
        # After the upload, which may outlast the lease: another machine's manifest is not
        # overwritten.
        lease.check()
        (self.root / MANIFEST).write((self.folder / MANIFEST).read_bytes())
        (self.root / ATTEMPT).delete()
        lease.clear()

    def delete_unlisted(self, manifest: dict[str, Any]) -> None:
        listed = {str(file["path"]) for file in manifest["files"]} | {MANIFEST}
        for name in self.root.files():
            if name not in listed and not name.startswith(LEASES):
                (self.root / name).delete()

    def send(self, names: Sequence[str]) -> int:
        """Upload those files of the mirror that differ from the remote ones; return how many."""
        stamps = {name: _file_stamp(self.folder / name) for name in names}
        changed = [name for name in names if self._sent_by_this_run.get(name) != stamps[name]]
        if not changed:
            return 0
        remote_files = self.root.files()

        def is_there(name: str) -> bool:
            info, note = remote_files.get(name), self._sent.get(name)
            if info is None or note is None or note.get("version") is None:
                return False
            return note == {**_file_stamp(self.folder / name), "version": content_version(info)}

        changed = [name for name in changed if not is_there(name)]
        transfer(self._send, changed)
        return len(changed)

    def drop(self, name: str) -> None:
        (self.root / name).delete()
        self._sent.pop(name, None)
        self._sent_by_this_run.pop(name, None)

    def fetch(self, manifest: dict[str, Any]) -> None:
        """Download a complete artifact, verified against its manifest, which is written last."""
        transfer(self._fetch, manifest["files"])
        for mark in (ATTEMPT, ERROR_LOG):
            (self.folder / mark).unlink(missing_ok=True)
        write_json(self.folder / MANIFEST, manifest)

    def mirror_key(self) -> str | None:
        """The key of the manifest or attempt in the mirror."""
        record = read_manifest(self.folder) or read_attempt(self.folder)
        return record["key"] if record else None

    def sync_mirror(self, stage: Stage) -> str | None:
        """Make the mirror's record match the remote one, and download the intermediate files to
        resume from. Returns the key of the remote artifact, if there is one."""
        own_key = stage_key(stage)
        complete, attempt = self.manifest(), self.attempt()
        record = complete or attempt
        mirror_key = self.mirror_key()
        if mirror_key and mirror_key != (record["key"] if record else own_key):
            backup_rename(self.folder)
            mirror_key = None
        if record is None:
            return None
        if mirror_key is None and record["key"] != own_key:
            # The `claim` callback of the store looks at the folder on this machine.
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / (MANIFEST if complete else ATTEMPT), record)
        if attempt and not complete and attempt["key"] == own_key:
            if changed_inputs(stage, attempt, digests_of_inputs(stage)):
                self.move_to_backup()
                return None
            names = list(self.root.files())
            while missing := stage.files_to_download(names, self.folder):
                for name in missing:
                    self._fetch({"path": name})
                # Damaged files are not requested again; older ones are.
                names = [name for name in names if name not in missing]
        return record["key"]

    def move_to_backup(self) -> None:
        """Move the remote artifact to the first free `<name>.old-<n>` beside it."""
        parent, name = split_parent(self.root.url)
        number, names = 1, RemotePath.from_url(parent).names()
        while f"{name}.old-{number}" in names:
            number += 1
        aside = RemotePath.from_url(parent) / f"{name}.old-{number}"
        files = [file for file in self.root.files() if not file.startswith(LEASES)]
        marks = [file for file in (MANIFEST, ATTEMPT) if file in files]
        # The manifest first: after a kill in between, what is left is not taken for a complete
        # artifact.
        for file in (*marks, *(file for file in files if file not in marks)):
            (self.root / file).move(aside / file)
        self._sent, self._sent_by_this_run = {}, {}

    def delete(self) -> None:
        """Delete the remote artifact, its manifest first."""
        (self.root / MANIFEST).delete()
        for name in self.root.files():
            (self.root / name).delete()
        remove(self._sent_file)

    def _record(self, name: str) -> dict[str, Any] | None:
        content = (self.root / name).read()
        if content is None:
            return None
        parse = parse_manifest if name == MANIFEST else parse_record
        location = f"{self.root.redacted_url}/{name}"
        return parse(content, location, "Delete it there to have it built again.")

    def _send(self, name: str) -> None:
        path, remote_path = self.folder / name, self.root / name
        # Before the upload: a file that changes during it has another stamp, and is sent again.
        stamp = _file_stamp(path)
        info = remote_path.put(path)
        with self._writing:
            self._sent_by_this_run[name] = stamp
            self._sent[name] = {**stamp, "version": content_version(info)}
            write_json(self._sent_file, self._sent)

    def _fetch(self, file: dict[str, Any]) -> None:
        """Download one file; verify `bytes` and `sha256` where `file` has them."""
        name = str(file["path"])
        # First, as it refuses names that lead out of the folder.
        remote_path = self.root / name
        target, expected_digest = self.folder / name, file.get("sha256")
        has_size = target.is_file() and target.stat().st_size == file.get("bytes")
        if expected_digest and has_size and sha256_file(target) == expected_digest:
            return
        if expected_digest and remote_path.info() is None:
            raise ArtifactError(
                f"{self.root.redacted_url} has a manifest, but {name} is missing.\n"
                "  Restore it, or build again with --force."
            )
        download(remote_path, target, expected_digest)


def download(remote_path: RemotePath, target: Path, expected_digest: str | None = None) -> None:
    """Download a file. Raises ArtifactError if its SHA-256 is not the expected one."""
    digest = hashlib.sha256()
    with (
        atomic_write(target) as part,
        open_file(remote_path.url) as source,
        part.open("wb") as stream,
    ):
        while block := source.read(CHUNK):
            digest.update(block)
            stream.write(block)
        # Inside the block: an exception keeps atomic_write from renaming the file to its name.
        if expected_digest and digest.hexdigest() != expected_digest:
            raise ArtifactError(
                f"{remote_path.redacted_url} differs from its manifest: its SHA-256 does not "
                "match.\n  Restore it, or build again with --force."
            )


def _file_stamp(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


class BackgroundUploader:
    """Uploads a stage's intermediate files as they appear, and the remaining ones at the end. A
    lost connection does not stop the stage: it is logged once, and the upload is retried."""

    def __init__(self, depot: RemoteArtifact, stage: Stage, notify: Callable[[str], None]) -> None:
        self._depot, self._stage, self._notify = depot, stage, notify
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="penstock-follower", daemon=True)
        self._complained = False
        self._uploaded: dict[str, None] = {}  # in order

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Upload the rest. An upload failure is raised only if nothing else has failed."""
        self._ended.set()
        self._thread.join()
        try:
            self.send("at the end")
        except PenstockError as failure:
            if error is None:
                raise
            self._complain(failure)

    def send(self, when: Literal["meanwhile", "at the end"]) -> None:
        """Upload new files, group by group, and delete remote files that were deleted locally.
        Files that keep changing are uploaded together with others, and at the end."""
        *groups, changing = self._stage.files_to_upload(self._depot.folder) or [[]]
        if not groups and not changing:
            return
        folder = self._depot.folder
        # The record first: another machine resumes no files whose build is unknown.
        num_sent = sum(self._send_group(group) for group in ([folder / ATTEMPT], *groups))
        names = [path.relative_to(folder).as_posix() for group in groups for path in group]
        self._uploaded |= dict.fromkeys(names)
        # The last file of a group goes first: it marks the group as complete.
        for name in reversed([n for n in self._uploaded if not (folder / n).exists()]):
            self._depot.drop(name)
            del self._uploaded[name]
        if num_sent or when == "at the end":
            self._send_group(changing)

    def _send_group(self, group: Sequence[Path]) -> int:
        folder = self._depot.folder
        names = [path.relative_to(folder).as_posix() for path in group if path.is_file()]
        try:
            return self._depot.send(names)
        except FileNotFoundError:
            # The stage deleted the file during its upload.
            return 0

    def _follow(self) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                self.send("meanwhile")
            except PenstockError as failure:
                self._complain(failure)

    def _complain(self, failure: PenstockError) -> None:
        if not self._complained:
            self._complained = True
            self._notify(f"{failure}\n  The work goes on here; sending is tried again.")
