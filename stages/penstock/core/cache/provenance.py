"""Code provenance: installed package versions and the git commit."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")


def versions() -> dict[str, str]:
    """Installed versions by package, and `commit` if the code is in a git checkout."""
    versions_by_package: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions_by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    if commit := _commit():
        versions_by_package["commit"] = commit
    return versions_by_package


def _commit() -> str | None:
    folder = Path(__file__).resolve().parent
    # A virtual environment inside a checkout of something else would give that checkout's commit.
    if "site-packages" in folder.parts:
        return None
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
