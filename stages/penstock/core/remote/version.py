"""Content version of a remote file, from its metadata, without reading it."""

import re
from typing import Any

from penstock.core.remote.path import Info

VERSIONS = ("md5", "etag", "generation", "modified")  # Names of identifiers in pins


def content_version(info: Info) -> dict[str, str] | None:
    """An identifier of the current content, or None if the server gives none.

    A content digest if the store has one; else the entity tag, which changes on every write; else
    the modification time, which is used together with the size stored in the pin.
    """
    return next(({name: value} for name, value in all_versions(info).items()), None)


def all_versions(info: Info) -> dict[str, str]:
    """Every identifier of the current content, the best one first."""
    versions: dict[str, str] = {}
    # MD5 of Google, Azure, web servers; tags of S3 and the web, Azure; times of S3, the web.
    for name, value in (
        ("md5", _text(info.get("md5Hash"))),
        ("md5", _text(_inner(info.get("content_settings"), "content_md5"))),
        ("md5", _text(info.get("Content-MD5"))),
        ("etag", _tag(info.get("ETag")) or _tag(info.get("etag"))),
        ("generation", _text(info.get("generation"))),
        ("modified", _text(info.get("LastModified")) or _text(info.get("Last-Modified"))),
    ):
        if value:
            versions.setdefault(name, value)
    return versions


def is_digest(version: dict[str, str]) -> bool:
    """Whether the identifier is unique to the content in any store: an MD5, or made of MD5s."""
    return "md5" in version or bool(_DIGEST.fullmatch(version.get("etag", "")))


# With a number: S3's tag of a multipart upload, an MD5 of the MD5s of that many parts.
_DIGEST = re.compile(r"[0-9a-f]{32}(-\d+)?")


def _tag(value: Any) -> str | None:
    """An entity tag without its quotes; a weak one keeps its `W/` prefix."""
    return _text(value.replace('"', "")) if isinstance(value, str) else None


def _text(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _inner(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
