"""Every Python of this machine that Penstock runs on."""

import os
import re
import subprocess
from pathlib import Path

PLACES = (
    *(Path(name) for name in ("/usr/bin", "/usr/local/bin", "/opt/homebrew/bin")),
    *Path("~/.pyenv/versions").expanduser().glob("3.*/bin"),
    *Path("~/.local/share/uv/python").expanduser().glob("*/bin"),
)
"""Where system packages, Homebrew, pyenv and uv put interpreters, besides PATH."""

NAME = re.compile(r"python3(\.\d+)?")
DESCRIBE = "import ensurepip, venv, sys; print('%d.%d.%d' % sys.version_info[:3])"


def interpreters() -> dict[str, Path]:
    """By version, from 3.11: an interpreter that can make a virtual environment."""
    folders = {*PLACES, *map(Path, os.get_exec_path())}
    # By its real path: an interpreter of a virtual environment is that of its base.
    files = {
        file.resolve()
        for folder in sorted(folders)
        for file in (folder.iterdir() if folder.is_dir() else ())
        if NAME.fullmatch(file.name) and file.exists() and not is_script(file)
    }
    by_version: dict[tuple[int, ...], Path] = {}
    for file in sorted(files):
        done = subprocess.run(
            [file, "-c", DESCRIBE], capture_output=True, text=True, check=False, timeout=60
        )
        version = tuple(map(int, done.stdout.split("."))) if done.stdout else ()
        if version >= (3, 11):
            by_version.setdefault(version, file)
    return {".".join(map(str, version)): by_version[version] for version in sorted(by_version)}


def is_script(file: Path) -> bool:
    """Whether it only looks for an interpreter, as the shims of pyenv do."""
    with file.open("rb") as stream:
        return stream.read(2) == b"#!"
