"""Whether the files of pinned sources are still the ones that were pinned.

A source is pinned when a run is planned, and read later. Whoever has read it verifies its files
afterwards, before the result is used.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.core.cache.digest_cache import digest_files
from penstock.core.cache.stage import Source
from penstock.core.errors import StageError
from penstock.core.os_errors import describe_os_error
from penstock.core.sources.pin_remote import downloaded_files

PinnedFile = tuple[Path, str]  # A local file and its digest: SHA-256, or 40 digits of git's SHA-1

_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


def pinned_files(sources: Iterable[Source]) -> list[PinnedFile]:
    """The local files of the sources: those that were pinned, or what is downloaded of them."""
    pinned: dict[PinnedFile, None] = {}
    for source in sources:
        if source.pin.get("kind") == "hub":
            files = _files_of_hub(str(source.pin["repo"]), str(source.pin["commit"]))
        elif source.urls:
            files = downloaded_files(source)
        else:
            entries = source.pin.get("files", ())
            files = [
                (path.absolute(), str(entry["sha256"]))
                for path, entry in zip(source.paths, entries, strict=bool(source.paths))
            ]
        pinned |= dict.fromkeys(files)
    return [*pinned]


def require_unchanged(files: Sequence[PinnedFile]) -> None:
    """Raise StageError, with their names, if files are no longer what they were when they were
    pinned. An unchanged file is not read again."""
    if changed := _changed_files(files):
        raise StageError(
            f"{', '.join(changed)} {'has' if len(changed) == 1 else 'have'} changed since this run "
            "was planned.\n  Run again when no process writes there."
        )


def _changed_files(files: Sequence[PinnedFile]) -> list[str]:
    by_sha256 = [file for file in files if len(file[1]) == 64]
    by_git = [file for file in files if len(file[1]) == 40]
    try:
        digests = digest_files(path for path, _ in by_sha256)
        digests += [git_digest(path) for path, _ in by_git]
    except OSError as error:
        return [f"{error.filename} ({describe_os_error(error)})"]
    pairs = zip([*by_sha256, *by_git], digests, strict=True)
    return [str(path) for (path, pinned), digest in pairs if digest != pinned]


def _files_of_hub(repo: str, commit: str) -> list[PinnedFile]:
    # The hub's cache names a file by its digest: SHA-256 if it is large, else git's; a snapshot has
    # links to them.
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - of runs with hub ids alone

    blobs: list[PinnedFile] = []
    for kind in ("model", "dataset"):
        folder = Path(HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}"
        for path in sorted((folder / "snapshots" / commit).rglob("*")):
            digest = path.readlink().name if path.is_symlink() else ""
            if path.is_file() and _DIGEST.fullmatch(digest):
                blobs.append((path, digest))
    return blobs


def git_digest(path: Path) -> str:
    """Git's object id of a file: SHA-1 of a header with its size, then its bytes."""
    header = b"blob %d\0" % path.stat().st_size
    with path.open("rb") as stream:
        # OpenSSL in FIPS mode refuses SHA-1 for security; here it only finds a file that changed.
        digest = hashlib.file_digest(stream, lambda: hashlib.sha1(header, usedforsecurity=False))
    return digest.hexdigest()
