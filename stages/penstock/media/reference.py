"""References to images in records, and the bytes that they lead to."""

import base64
import binascii
import os
import posixpath
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from penstock.core import env
from penstock.core.cache.record import digest_json
from penstock.core.errors import PenstockError
from penstock.core.files import require_regular
from penstock.core.remote.open import open_file, open_version
from penstock.core.remote.path import Info, RemotePath
from penstock.core.remote.urls import redact
from penstock.core.remote.version import content_version
from penstock.media.decode import BadImage
from penstock.media.frame_list import join_frames
from penstock.media.kinds import IMAGE, KINDS

DATA_URI = "data:"
WEB = ("http://", "https://")
SHOWN = 120  # Maximum characters of a location in messages

Folder = Path | str  # A folder of this machine, or the URL of one in an object store


@dataclass(frozen=True)
class ImageRef:
    """An image, audio or video in a record: a path, URL or data URI, or the bytes themselves; or
    the frames of a video."""

    location: str = ""
    content: bytes = b""
    kind: str = IMAGE.name
    frames: tuple["ImageRef", ...] = ()  # The images that a video consists of, in order
    fps: float | None = None  # Of these frames, per second; None: unknown

    @property
    def paths(self) -> list[str]:
        """The files that it names, or its frames do."""
        named = [frame.location for frame in self.frames or (self,)]
        return [path for path in named if path and not path.startswith((DATA_URI, *WEB))]

    @property
    def is_path(self) -> bool:
        """Whether all of it is in files, rather than in the data or on the web."""
        return len(self.paths) == len(self.frames or (self,))

    def __str__(self) -> str:
        if self.frames:
            return f"{self.kind} of {len(self.frames)} frames, the first {self.frames[0]}"
        if not self.location:
            return f"{self.kind} of {len(self.content):,} bytes"
        if self.location.startswith(DATA_URI):
            return "data URI"
        return self.location if len(self.location) <= SHOWN else f"{self.location[:SHOWN]}…"


class WebImages(Protocol):
    """Remembers which image a URL led to."""

    def find(self, url: str) -> bytes | None:
        """The image that was fetched from this URL before."""
        ...

    def remember(self, url: str, content: bytes) -> None:
        """Keep the image of this URL."""
        ...


def image_digest(content: bytes) -> bytes:
    """The identity of an image: SHA-256 of its encoded bytes, 32 bytes."""
    return sha256(content).digest()


def among_several(digest: bytes) -> bytes:
    """The identity, given that of an image, of its tensors in a sample with several images, where
    they are other ones than those of an image alone."""
    return sha256(digest + b"among several").digest()


def name_below(location: str) -> str | None:
    """The name below a folder's URL of the file that a location leads to; None for one that is no
    path, or leaves the folder."""
    name = posixpath.normpath(location)
    is_outside = name in (".", "..") or name.startswith(("../", "/"))
    is_path = not any(mark in location for mark in ("\0", "\\", "://"))
    return name if is_path and not is_outside else None


def file_version(info: Info) -> dict[str, Any]:
    """Size of a file in an object store, and its version there."""
    return {"bytes": info["size"], **(content_version(info) or {})}


def from_base64(text: str, kind: str = IMAGE.name) -> ImageRef:
    """An image or audio in base64, with or without the head of a data URI. Raises BadImage."""
    head, comma, body = text.partition(",")
    if text.startswith(DATA_URI):
        if not comma or not head.endswith(";base64"):
            raise BadImage("the data URI is not in base64")
        text = body
    try:
        # MIME breaks the lines. Without validate, other characters are skipped, and the image is
        # another.
        content = base64.b64decode("".join(text.split()), validate=True)
        return ImageRef(content=content, kind=kind)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"it is not base64 ({error})") from error


def read_image(
    ref: ImageRef, root: Folder | None, web: WebImages, *, allow_private: bool = False
) -> bytes:
    """The encoded image, audio or video. Paths are relative to `root` and lie in it; URLs lead to
    public addresses, unless `allow_private`. Raises
    BadImage, and for an object store that cannot be read the errors of `core.remote`."""
    if not ref.frames:
        return _read_one(ref, root, web, allow_private)
    limit, bytes_left = KINDS[ref.kind].max_bytes, KINDS[ref.kind].max_bytes
    contents: list[bytes] = []
    for number, frame in enumerate(ref.frames, 1):
        try:
            contents.append(_read_one(frame, root, web, allow_private))
        except BadImage as error:
            raise BadImage(f"frame {number}: {error}") from error
        bytes_left -= len(contents[-1])
        if bytes_left < 0:
            raise BadImage(f"its frames have more than {limit:,} bytes")
    return join_frames(contents, ref.fps)


def _read_one(ref: ImageRef, root: Folder | None, web: WebImages, allow_private: bool) -> bytes:
    location, limit = ref.location, KINDS[ref.kind].max_bytes
    if not location:
        return ref.content
    if location.startswith(DATA_URI):
        return from_base64(location).content
    if location.startswith(WEB):
        return _fetch(location, limit, web, allow_private)
    if location.startswith("file://"):
        location = unquote(urlsplit(location).path)
    elif "://" in location:
        raise BadImage(f"{ref}: only http, https and file URLs are read")
    if isinstance(root, str):
        return _read_remote(location, limit, root, web)
    return _read_file(location, limit, root)


def image_path(location: str, root: Path) -> Path | None:
    """The path that a location leads to; None for one that is no path, or leaves `root`. Links are
    not resolved: data of the hub is stored as links out of its folder."""
    if location.startswith((DATA_URI, *WEB)):
        return None
    if location.startswith("file://"):
        location = unquote(urlsplit(location).path)
    if "\0" in location or "://" in location:
        return None
    top = os.path.abspath(root)  # noqa: PTH100 - resolves no links
    path = os.path.normpath(os.path.join(top, os.path.expanduser(location)))  # noqa: PTH111, PTH118
    return Path(path) if Path(path).is_relative_to(top) else None


def _read_file(location: str, limit: int, root: Path | None) -> bytes:
    if root is None:
        raise BadImage(
            f"{location[:SHOWN]} is a path, and the data is not a local file, or has no such file; "
            "set image_folder to the folder of its images"
        )
    path = image_path(location, root)
    if path is None:
        raise BadImage(
            f"{location[:SHOWN]} is outside of {root}; set image_folder to the folder of the images"
        )
    try:
        require_regular(path)
        size = path.stat().st_size
        if size > limit:
            raise BadImage(f"it has {size:,} bytes; {limit:,} are allowed")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadImage(f"there is no {path}") from error
    except OSError as error:
        raise BadImage(f"{path} cannot be read: {error.strerror or error}") from error


def _read_remote(location: str, limit: int, root: str, web: WebImages) -> bytes:
    """The image at a path below a URL, which is fetched once for each version in the store."""
    name = name_below(location)
    if name is None:
        raise BadImage(f"{location[:SHOWN]} is outside of {redact(root)}")
    remote = RemotePath.from_url(root) / name
    info = remote.info()
    if info is None:
        raise BadImage(f"there is no {remote.redacted_url}")
    if info["size"] > limit:
        raise BadImage(f"it has {info['size']:,} bytes; {limit:,} are allowed")
    key = f"{remote.redacted_url}#{digest_json(file_version(info))}"
    if cached := web.find(key):
        return cached
    with open_version(remote, info) as stream:
        content = stream.read()
    web.remember(key, content)
    return content


def _fetch(url: str, limit: int, web: WebImages, allow_private: bool) -> bytes:
    if cached := web.find(url):
        return cached
    if env.hub_is_offline():
        raise BadImage(f"{redact(url)[:SHOWN]} is on the web, and HF_HUB_OFFLINE is set")
    try:
        with open_file(url, is_trusted=allow_private, max_bytes=limit) as stream:
            content = stream.read()
    except (PenstockError, OSError) as error:
        reason, _, remedy = str(error).partition("\n")
        if "a private, link-local or loopback" in remedy + reason:
            reason += " Set allow_private_urls of the data set if its URLs may lead there."
        raise BadImage(f"{redact(url)[:SHOWN]} cannot be fetched: {reason}") from error
    web.remember(url, content)
    return content
