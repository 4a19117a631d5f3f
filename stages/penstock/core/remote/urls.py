"""URL parsing and redaction."""

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
"""The supported schemes, and the extra of this package that each needs."""

WEB = frozenset({"http", "https"})  # Schemes of single files, without listing or writing

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>|]+")


def is_url(location: str) -> bool:
    """Whether the text is a URL; `file://` is treated as a path."""
    return "://" in location and not location.startswith("file://")


def local_path(location: str) -> str:
    """The path of a `file://` URL; anything else unchanged."""
    return location.removeprefix("file://") or "/" if location.startswith("file://") else location


def url_scheme(url: str) -> str:
    """The scheme in lower case. Raises ConfigError for an unsupported scheme."""
    scheme = url.split("://", 1)[0].lower()
    # fsspec opens `zip://a::s3://b` as a chain of file systems, each of which may be any.
    if scheme not in PACKAGE_OF or "::" in url:
        schemes = ", ".join(f"{name}://" for name in PACKAGE_OF if name != "memory")
        raise ConfigError(
            f"{redact(url)} is not a URL that can be read here.\n"
            f"  Those that can start with {schemes}."
        )
    return scheme


def redact(location: str) -> str:
    """The URL without user, password, query and fragment, for logs, keys and errors.

    In `abfs://container@account…` the part before `@` is not secret and is kept, as in `abfss://`
    and `az://`. A local path is returned unchanged.
    """
    if not is_url(location):
        return location
    parts = urlsplit(location)
    user, separator, host = parts.netloc.rpartition("@")
    is_azure = PACKAGE_OF.get(parts.scheme) == "azure"
    open_user = separator and ":" not in user and is_azure
    return urlunsplit((parts.scheme, parts.netloc if open_user else host, parts.path, "", ""))


def redact_text(text: str) -> str:
    """Redact every URL in the text. Of an invalid URL, only the beginning is kept."""

    def redact_match(match: re.Match[str]) -> str:
        try:
            return redact(match[0])
        except ValueError:
            return f"{match[0].partition('://')[0]}://..."

    return _URL.sub(redact_match, text)


def url_join(url: str, *names: str) -> str:
    """Join names to a folder's URL."""
    parts = urlsplit(url)
    path = posixpath.join(parts.path or "/", *names)
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def split_parent(url: str) -> tuple[str, str]:
    """The URL of the parent folder, and the last name."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rstrip("/").rpartition("/")
    return urlunsplit((parts.scheme, parts.netloc, folder or "/", parts.query, "")), name
