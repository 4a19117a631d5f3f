"""Store of encoded images by content: `<folder>/<first two digits>/<SHA-256>`.

An image in data (bytes, base64) or of the web is stored once, however many records, files and runs
use it; files are not copied. What a URL led to is in
`urls/<SHA-256 of the URL>`, so that it is fetched once.
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from penstock.core.files import PART
from penstock.media.reference import among_several, image_digest

ORIGINALS = "images"  # Folder of this store beside the processed images

URLS = "urls"

DAY = 86_400.0


@dataclass(frozen=True)
class Originals:
    """The images in a folder."""

    folder: Path

    def path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / name

    def add(self, content: bytes) -> bytes:
        """Store an image unless it is there; returns its digest."""
        digest = image_digest(content)
        path = self.path(digest)
        try:
            is_stored = path.stat().st_size == len(content)
        except OSError:
            is_stored = False
        if not is_stored:
            _write(path, content)
        return digest

    def read(self, digest: bytes) -> bytes | None:
        """The image; None if it is missing or damaged."""
        try:
            content = self.path(digest).read_bytes()
        except OSError:
            return None
        return content if image_digest(content) == digest else None

    def find(self, url: str) -> bytes | None:
        """The image that was fetched from this URL before."""
        try:
            name = self._url_path(url).read_text()
            return self.read(bytes.fromhex(name))
        except (OSError, ValueError):
            return None

    def remember(self, url: str, content: bytes) -> None:
        _write(self._url_path(url), self.add(content).hex().encode())

    def _url_path(self, url: str) -> Path:
        return self.folder / URLS / sha256(url.encode()).hexdigest()


def _write(target: Path, content: bytes) -> None:
    # Not forced to the disk: a file that a crash leaves short is noticed by its size or digest, and
    # is written again.
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid4().hex}{PART}")
    try:
        part.write_bytes(content)
        part.replace(target)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def prunable_originals(
    folder: Path, used: Collection[bytes], older_than: float = DAY
) -> Iterator[list[Path]]:
    """The files of each image that can be read from the data again, and of those of the web that
    are not `used` (digests).

    Skips those younger than a day (or `older_than` seconds): a run may be about to use them.
    """
    latest = time.time() - max(older_than, DAY)
    fetched: dict[str, list[Path]] = {}
    for path in (folder / URLS).glob("*"):
        if path.is_file():
            fetched.setdefault(path.read_text(), []).append(path)
    for path in sorted(folder.glob("??/*")):
        files = [path, *fetched.get(path.name, ())]
        is_used = False
        if path.name in fetched:
            digest = bytes.fromhex(path.name)
            is_used = digest in used or among_several(digest) in used
        if not is_used and all(file.stat().st_mtime < latest for file in files):
            yield files
