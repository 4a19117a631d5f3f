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
TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*")
"""License files that must be redistributed."""

SAID_BY = {
    "apache-2.0": "apache license version 2.0",
    "mit": "permission is hereby granted, free of charge, to any person obtaining a copy",
}
"""Phrases in the first sentences of a license text that identify it, in lower case."""

OPENING = 600
"""Number of characters of a text that are searched."""


@dataclass(frozen=True)
class Licence:
    """A license by its Hub id; `other` has its own name and link."""

    id: str
    name: str | None = None
    link: str | None = None

    @property
    def front_matter(self) -> dict[str, Any]:
        """The front matter fields of a card."""
        return {"license": self.id, "license_name": self.name, "license_link": self.link}

    @property
    def spoken(self) -> str:
        """The name shown to users."""
        return self.name or self.id


def licence_in(folder: Path) -> Licence | None:
    """The license of the model in `folder`: from its card, else from its license text.

    None if there is neither, or an unreadable card and no text.
    """
    texts = licence_texts(folder)
    said = _said_by(folder / CARD)
    if said and said.link and not said.link.startswith(("https://", "http://")):
        # A relative link is only valid if it points to a license text that is copied, too.
        here = said.link in {path.name for path in texts}
        said = Licence(said.id, said.name, said.link if here else None)
    if said:
        return said
    for path in texts:
        if not path.name.startswith("NOTICE"):
            return _known_by(path)
    return None


def licence_texts(folder: Path) -> list[Path]:
    """The license files in `folder`, sorted by name."""
    return sorted({path for each in TEXTS for path in folder.glob(each) if path.is_file()})


def pass_on(folder: Path, out: Path) -> None:
    """Copy the license files in `folder` to `out`, except those that exist there."""
    for path in licence_texts(folder):
        if not (out / path.name).is_file():
            with atomic_write(out / path.name) as part:
                shutil.copyfile(path, part)


def licence_of_dataset(repo: str, commit: str) -> Licence | None:
    """The license in the card of a Hub data set at that commit; None if it names none, or if the
    card is neither reachable nor cached."""
    try:
        card = hf_hub_download(
            repo, CARD, repo_type="dataset", revision=commit, token=env.hub_token()
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None
    return _said_by(Path(card))


def _said_by(card: Path) -> Licence | None:
    try:
        said: Mapping[str, Any] = metadata_load(card) or {}
    except (OSError, ValueError, YAMLError):  # ValueError: no text, or not a mapping
        return None
    value = said.get("license")
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    if not isinstance(value, str) or not value.strip():
        return None
    name, link = (said.get(f"license_{each}") for each in ("name", "link"))
    return Licence(
        value.strip(),
        name.strip() if isinstance(name, str) else None,
        link.strip() if isinstance(link, str) else None,
    )


def _known_by(text: Path) -> Licence:
    opening = " ".join(text.read_text(encoding="utf-8", errors="replace")[:OPENING].lower().split())
    plain = opening.replace("license, version", "license version")
    for name, words in SAID_BY.items():
        if words in plain:
            return Licence(name)
    return Licence("other", None, PurePosixPath(text.name).name)
