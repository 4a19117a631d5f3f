"""License detection for base models and data sets."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, metadata_load
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from yaml import YAMLError

from penstock.core import env
from penstock.core.files import atomic_write

CARD = "README.md"
LICENSE_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*")  # License files that must be redistributed

LICENSE_PHRASES = {
    "apache-2.0": "apache license version 2.0",
    "mit": "permission is hereby granted, free of charge, to any person obtaining a copy",
}
"""Phrases in the first sentences of a license text that identify it, in lower case."""

MAX_SEARCHED_CHARACTERS = 600  # Number of characters of a text that are searched


@dataclass(frozen=True)
class License:
    """A license by its Hub id; `other` has its own name and link."""

    id: str
    name: str | None = None
    link: str | None = None

    @property
    def front_matter(self) -> dict[str, Any]:
        return {"license": self.id, "license_name": self.name, "license_link": self.link}

    @property
    def display_name(self) -> str:
        return self.name or self.id


def detect_license(folder: Path) -> License | None:
    """The license of the model in `folder`: from its card, else from its license text. None if
    there is neither, or an unreadable card and no text."""
    texts = license_files(folder)
    if license_ := _read_card_license(folder / CARD):
        is_relative = license_.link and not license_.link.startswith(("https://", "http://"))
        # A relative link is only valid if it points to a license text that is copied, too.
        if is_relative and license_.link not in {path.name for path in texts}:
            return replace(license_, link=None)
        return license_
    for path in texts:
        if not path.name.startswith("NOTICE"):
            text = path.read_text(encoding="utf-8", errors="replace")[:MAX_SEARCHED_CHARACTERS]
            opening = " ".join(text.lower().split()).replace("license, version", "license version")
            names = (name for name, phrase in LICENSE_PHRASES.items() if phrase in opening)
            name = next(names, None)
            return License(name) if name else License("other", link=path.name)
    return None


def license_files(folder: Path) -> list[Path]:
    """The license files in `folder`, sorted by name."""
    return sorted(
        {path for pattern in LICENSE_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    )


def copy_license_files(folder: Path, out: Path) -> None:
    """Copy the license files in `folder` to `out`, except those that exist there."""
    for path in license_files(folder):
        if not (out / path.name).is_file():
            with atomic_write(out / path.name) as part:
                shutil.copyfile(path, part)


def fetch_dataset_license(repo: str, commit: str) -> License | None:
    """The license in the card of a Hub data set at that commit; None if it names none, or if the
    card is neither reachable nor cached."""
    try:
        card = hf_hub_download(
            repo, CARD, repo_type="dataset", revision=commit, token=env.hub_token()
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None
    return _read_card_license(Path(card))


def _read_card_license(card: Path) -> License | None:
    try:
        card_license: Mapping[str, Any] = metadata_load(card) or {}
    except (OSError, ValueError, YAMLError):  # ValueError: no text, or not a mapping
        return None
    value = card_license.get("license")
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    if not isinstance(value, str) or not value.strip():
        return None
    texts = (card_license.get(f"license_{key}") for key in ("name", "link"))
    return License(value.strip(), *(t.strip() if isinstance(t, str) else None for t in texts))
