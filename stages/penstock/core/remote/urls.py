"""URLs as text: what they are called, and how they are said without what is secret in them."""

import posixpath
import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from penstock.core.errors import ConfigError

PACKAGE_OF: Mapping[str, str | None] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "abfs": "azure",
    "abfss": "azure",
    "az": "azure",
    "http": None,
    "https": None,
    "memory": None,
}
"""The schemes that can be read, and the extra of this package that each needs."""

WEB = frozenset({"http", "https"})
"""Schemes that name single files: there is no listing and no writing."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>|]+")


def is_url(location: str) -> bool:
    """Whether the text names something by scheme; `file://` is a path written otherwise."""
    return "://" in location and not location.startswith("file://")


def local_path(location: str) -> str:
    """The path that `file://` stands for; anything else as it is."""
    return location.removeprefix("file://") or "/" if location.startswith("file://") else location


def url_scheme(url: str) -> str:
    """The part before `://`, in lower case. Raises ConfigError for one that cannot be read."""
    scheme = url.split("://", 1)[0].lower()
    if scheme not in PACKAGE_OF or "::" in url:
        known = ", ".join(f"{name}://" for name in PACKAGE_OF if name != "memory")
        raise ConfigError(
            f"{redact(url)} is not a URL that can be read here.\n"
            f"  Those that can start with {known}."
        )
    return scheme


def redact(location: str) -> str:
    """The URL without user, password, query and fragment: fit for logs, keys and errors.

    In `abfs://container@account…` the part before `@` is no secret, and stays. A local path is
    returned as it is.
    """
    if not is_url(location):
        return location
    parts = urlsplit(location)
    user, at, host = parts.netloc.rpartition("@")
    open_user = at and ":" not in user and parts.scheme.startswith("abfs")
    return urlunsplit((parts.scheme, parts.netloc if open_user else host, parts.path, "", ""))


def redact_text(text: str) -> str:
    """The text with every URL in it as `redact` says it; of what only looks like one, nothing but
    how it begins."""
    return _URL.sub(_spoken_in_text, text)


def _spoken_in_text(found: re.Match[str]) -> str:
    try:
        return redact(found[0])
    except ValueError:
        return f"{found[0].partition('://')[0]}://..."


def url_join(url: str, *names: str) -> str:
    """The URL of something below a folder's URL."""
    parts = urlsplit(url)
    path = posixpath.join(parts.path or "/", *names)
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def split_parent(url: str) -> tuple[str, str]:
    """The URL of the folder around it, and its own last name."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rstrip("/").rpartition("/")
    return urlunsplit((parts.scheme, parts.netloc, folder or "/", parts.query, "")), name
