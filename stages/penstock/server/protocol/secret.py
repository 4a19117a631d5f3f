"""Shared secrets of two processes, for encrypting their channel. Needs no ZeroMQ."""

import re
import secrets
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.files import atomic_write

SECRET = re.compile(r"[0-9a-f]{64}")


def new_secret() -> str:
    """A random secret of 64 hex digits."""
    return secrets.token_hex(32)


def write_secret(path: Path, secret: str) -> None:
    """Write a secret to a file that only its owner can read."""
    with atomic_write(path) as part:
        # The file of an interrupted write would keep its mode, which `touch` does not change.
        part.unlink(missing_ok=True)
        part.touch(mode=0o600)
        part.write_text(secret + "\n", encoding="ascii")


def read_secret(path: Path) -> str:
    """Read a secret. Raises ConfigError if it is invalid or others can read it."""
    require_private(path)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not SECRET.fullmatch(text):
        raise ConfigError(
            f"{path} holds no secret.\n  Delete it, and start the workers again: they write one."
        )
    return text


def require_private(path: Path) -> None:
    """Raise ConfigError for a file that is missing or that others can read."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist.\n  Name a file that does.")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"{path} may be read or written by others (mode {mode:03o}), and holds a secret.\n"
            f"  Run chmod 600 {path}."
        )
