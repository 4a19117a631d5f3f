"""A result of a stage for `penstock artifacts`, in a folder or at a URL."""

import hashlib
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.compose.stage import Compose, model_keys
from penstock.core.cache.input_digests import read_attempt
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import ATTEMPT
from penstock.core.cache.store import REPLACED, lock_path
from penstock.core.cache.verify import damaged_files
from penstock.core.errors import StageError
from penstock.core.files import regular_files, remove
from penstock.core.remote.artifact_sync import RemoteArtifact
from penstock.core.remote.lease import LEASES
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.open import open_file
from penstock.core.remote.path import RemotePath, require_relative
from penstock.core.remote.urls import split_parent
from penstock.core.replace_folder import delete_folder

CHUNK = 4 << 20


@dataclass(frozen=True)
class Entry(ABC):
    """A result, complete or not."""

    manifest: dict[str, Any] | None

    @property
    @abstractmethod
    def where(self) -> str:
        """Its folder, or its URL."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Total size in bytes."""

    @property
    @abstractmethod
    def root(self) -> Path:
        """The folder on this machine that records which results are in use."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Its folder on this machine, or its mirror, which may not exist."""

    @abstractmethod
    def attempt(self) -> dict[str, Any]:
        """The record of an incomplete result: its stage, key and inputs."""

    @abstractmethod
    def faults(self) -> list[str]:
        """A line for each difference from the manifest; empty if there is none."""

    @abstractmethod
    def delete(self) -> None:
        """Remove it."""

    @property
    def key(self) -> str:
        """The full key if it is known, else the folder's name."""
        return self.manifest["key"] if self.manifest else posixpath.basename(self.where)

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return str((self.manifest or self.attempt())["stage"])

    @property
    def keys(self) -> set[str]:
        """The keys under which it is an input of other results: its own, and those of the content
        of a composed model."""
        manifest = self.manifest
        if manifest is None or manifest["stage"] != Compose.name:
            return {self.key}
        return {self.key, *model_keys(manifest)}

    @property
    def input_keys(self) -> set[str]:
        """Keys of its inputs."""
        if self.manifest:
            return {source["key"] for source in self.manifest["inputs"].values()}
        return set(self.attempt()["inputs"].values())


@dataclass(frozen=True)
class LocalEntry(Entry):
    """A result in a folder of this machine."""

    path: Path
    unfinished: dict[str, Any] | None = None
    """The record of an incomplete result."""

    @classmethod
    def read(cls, folder: Path) -> "LocalEntry | None":
        """Read the result in the folder; None if there is none, or no longer."""
        for _ in range(2):  # A run may finish it between the two reads.
            if manifest := read_manifest(folder):
                return cls(manifest, folder)
            if attempt := read_attempt(folder):
                return cls(None, folder, attempt)
        return None

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def num_bytes(self) -> int:
        total = 0
        for path in regular_files(self.path):
            with suppress(FileNotFoundError):  # A run may be replacing files.
                total += path.stat().st_size
        return total

    @property
    def root(self) -> Path:
        """The folder of all stages."""
        return self.path.parent.parent

    @property
    def folder(self) -> Path:
        return self.path

    def attempt(self) -> dict[str, Any]:
        assert self.unfinished, "a result has a manifest or this"
        return self.unfinished

    def faults(self) -> list[str]:
        if self.manifest is None:
            return [f"{self.path}: no manifest"]
        return damaged_files(self.path, self.manifest["files"], "always")

    def delete(self) -> None:
        """Remove the folder and its lock."""
        delete_folder(self.path)
        remove(lock_path(self.path))


@dataclass(frozen=True)
class RemoteEntry(Entry):
    """A result at a URL. `sizes` has the bytes of each file by name."""

    path: RemotePath
    sizes: dict[str, int]

    @property
    def where(self) -> str:
        return self.path.redacted_url

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def is_leased(self) -> bool:
        """Whether a machine is building it, or died while it did."""
        return any(name.startswith(LEASES) for name in self.sizes)

    @property
    def root(self) -> Path:
        """The mirror of the folder of all stages."""
        parent, _ = split_parent(self.path.url)
        return local_cache_dir(split_parent(parent)[0])

    @property
    def folder(self) -> Path:
        """Its mirror."""
        root, stage, key = self.path.url.rsplit("/", 2)
        return local_cache_dir(root) / stage / key

    def attempt(self) -> dict[str, Any]:
        attempt = RemoteArtifact(self.path.url, local_cache_dir(self.path.url)).attempt()
        assert attempt, "a result has a manifest or this"
        return attempt

    def faults(self) -> list[str]:
        """A line for each difference from the manifest; every byte is read."""
        if self.manifest is None:
            return [f"{self.where}: no manifest"]
        faults: list[str] = []
        for file in self.manifest["files"]:
            name = require_relative(str(file["path"]))
            called = f"{self.where}/{name}"
            if name not in self.sizes:
                faults.append(f"{called}: missing")
            elif self.sizes[name] != file["bytes"]:
                faults.append(
                    f"{called}: {self.sizes[name]} bytes, {file['bytes']} in the manifest"
                )
            elif _sha256_of_remote((self.path / name).url) != file["sha256"]:
                faults.append(f"{called}: content differs from the manifest")
        return faults

    def delete(self) -> None:
        """Remove it at the URL and in the local mirror. Raises StageError while it is built."""
        if self.is_leased:
            raise StageError(
                f"{self.where} is being built, or its builder died.\n"
                "  Run its config again, and prune later."
            )
        mirror = self.folder
        RemoteArtifact(self.path.url, mirror).delete()
        remove(mirror)
        remove(lock_path(mirror))


def local_entries(root: Path, depth: int) -> Iterator[Entry]:
    """Every result below a folder, sorted by path."""
    for folder in sorted(_result_folders(root, depth)):
        if entry := LocalEntry.read(folder):
            yield entry


def remote_entries(url: str) -> Iterator[Entry]:
    """Every result below a URL, sorted by name, from one listing."""
    root = RemotePath.from_url(url)
    # A listing has many files per request; asking for each one would be a request per file.
    sizes = {name: int(info["size"] or 0) for name, info in root.files().items()}
    marked = {posixpath.dirname(n) for n in sizes if posixpath.basename(n) in (MANIFEST, ATTEMPT)}
    for folder in sorted(marked):
        below = f"{folder}/" if folder else ""
        remote_folder = root / folder if folder else root
        file_sizes = {
            name.removeprefix(below): n for name, n in sizes.items() if name.startswith(below)
        }
        yield RemoteEntry(
            RemoteArtifact(remote_folder.url, local_cache_dir(remote_folder.url)).manifest(),
            remote_folder,
            file_sizes,
        )


def is_result(folder: Path) -> bool:
    """Whether the folder holds a result, complete or not."""
    return (folder / MANIFEST).is_file() or (folder / ATTEMPT).is_file()


def _result_folders(root: Path, depth: int) -> Iterator[Path]:
    if is_result(root):
        yield root
        return
    if depth:
        for child in root.iterdir():
            # Links, such as `hf` in a run's folder, lead to results that are found at their places.
            hidden = child.name.startswith(".") or child.name.endswith(REPLACED)
            if child.is_dir() and not child.is_symlink() and not hidden:
                yield from _result_folders(child, depth - 1)


def _sha256_of_remote(url: str) -> str:
    digest = hashlib.sha256()
    with open_file(url) as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()
