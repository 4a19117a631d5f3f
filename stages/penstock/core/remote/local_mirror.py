"""A folder on this machine for a folder behind a URL: stages work here, results are kept there.

It is a cache: losing it costs a download of what is sealed, and the work that was not.
"""

import re
import uuid
from pathlib import Path

from filelock import FileLock

from penstock.core import env
from penstock.core.cache.record import digest_of
from penstock.core.cache.stage import short
from penstock.core.files import publishing
from penstock.core.remote.urls import is_url, local_path, spoken

MIRRORS = "mirrors"
HOLDER = ".holder"


def home_of(location: str) -> Path:
    """The folder to work in: the path the user typed, or the mirror of the URL."""
    if not is_url(location):
        return Path(local_path(location))
    url = spoken(location).rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", url.split("://", 1)[1])[-40:].strip("-.")
    return env.cache_home() / MIRRORS / f"{readable}-{short(digest_of(url))}"


def holder_of() -> str:
    """A word for this machine's mirrors, the same in all processes that share their locks."""
    file = env.cache_home() / MIRRORS / HOLDER
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f"{HOLDER}.lock")):
        if not file.is_file():
            with publishing(file) as part:
                part.write_text(uuid.uuid4().hex)
        return file.read_text()
