"""License detection for base models and data sets."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import hf_hub_download, metadata_load
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from yaml import YAMLError

from penstock.core import env
from penstock.core.files import atomic_write

CARD = "README.md"
LICENSE_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*")
"""License files that must be redistributed."""

LICENSE_PHRASES = {
    "apache-2.0": "apache license version 2.0",
    "mit": "permission is hereby granted, free of charge, to any person obtaining a copy",
}
"""Phrases in the first sentences of a license text that identify it, in lower case."""

MAX_SEARCHED_CHARACTERS = 600
"""Number of characters of a text that are searched."""


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
    """The license of the model in `folder`: from its card, else from its license text.

    None if there is neither, or an unreadable card and no text.
    """
    texts = license_files(folder)
    card_license = _read_card_license(folder / CARD)
    if (
        card_license
        and card_license.link
        and not card_license.link.startswith(("https://", "http://"))
    ):
        # A relative link is only valid if it points to a license text that is copied, too.
        is_local = card_license.link in {path.name for path in texts}
        card_license = License(
            card_license.id, card_license.name, card_license.link if is_local else None
        )
    if card_license:
        return card_license
    for path in texts:
        if not path.name.startswith("NOTICE"):
            return _identify_license_text(path)
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
    name, link = (card_license.get(f"license_{key}") for key in ("name", "link"))
    return License(
        value.strip(),
        name.strip() if isinstance(name, str) else None,
        link.strip() if isinstance(link, str) else None,
    )


def _identify_license_text(text: Path) -> License:
    opening = " ".join(
        text.read_text(encoding="utf-8", errors="replace")[:MAX_SEARCHED_CHARACTERS].lower().split()
    )
    plain = opening.replace("license, version", "license version")
    for name, phrases in LICENSE_PHRASES.items():
        if phrases in plain:
            return License(name)
    return License("other", None, PurePosixPath(text.name).name)
