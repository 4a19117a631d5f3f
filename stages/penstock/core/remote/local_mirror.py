"""Local mirror of a remote folder: stages work in the mirror, artifacts are stored remotely. The
mirror is a cache. Losing it costs a download of complete artifacts, and incomplete work."""

import re
import uuid
from pathlib import Path

from penstock.core import env
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short
from penstock.core.file_lock import acquire_lock
from penstock.core.files import atomic_write
from penstock.core.remote.urls import is_url, local_path, redact

MIRRORS = "mirrors"
HOLDER = ".holder"


def local_cache_dir(location: str) -> Path:
    """The folder to work in: the user's path, or the mirror of the URL."""
    if not is_url(location):
        return Path(local_path(location))
    url = redact(location).rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", url.split("://", 1)[1])[-40:].strip("-.")
    return env.cache_home() / MIRRORS / f"{readable}-{short(digest_json(url))}"


def mirror_holder() -> str:
    """Identifier of this machine's mirrors, the same in all processes that share their locks."""
    file = env.cache_home() / MIRRORS / HOLDER
    file.parent.mkdir(parents=True, exist_ok=True)
    with acquire_lock(file.with_name(f"{HOLDER}.lock")):
        if not file.is_file():
            with atomic_write(file) as part:
                part.write_text(uuid.uuid4().hex)
        return file.read_text()
