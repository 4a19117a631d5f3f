"""Under which licence others have put what a model was made of, as far as they say."""

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
"""Files that licences ask to be passed on."""

SAID_BY = {
    "apache-2.0": "apache license version 2.0",
    "mit": "permission is hereby granted, free of charge, to any person obtaining a copy",
}
"""How the text of a licence is known: what stands within its first sentences, in lower case."""

OPENING = 600
"""Characters of a text that are looked at."""


@dataclass(frozen=True)
class Licence:
    """A licence by its name on the hub; `other` has a name and a link of its own."""

    id: str
    name: str | None = None
    link: str | None = None

    @property
    def front_matter(self) -> dict[str, Any]:
        """The fields of a card's metadata."""
        return {"license": self.id, "license_name": self.name, "license_link": self.link}

    @property
    def spoken(self) -> str:
        """What people call it."""
        return self.name or self.id


def licence_in(folder: Path) -> Licence | None:
    """The licence of the model in `folder`: what its card says, else what its text is known by.

    None where it has neither, or a card that cannot be read and no text.
    """
    texts = licence_texts(folder)
    said = _said_by(folder / CARD)
    if said and said.link and not said.link.startswith(("https://", "http://")):
        # A link within its repository leads nowhere but to a text that is passed on.
        here = said.link in {path.name for path in texts}
        said = Licence(said.id, said.name, said.link if here else None)
    if said:
        return said
    for path in texts:
        if not path.name.startswith("NOTICE"):
            return _known_by(path)
    return None


def licence_texts(folder: Path) -> list[Path]:
    """The files in `folder` that go along with the model, sorted by name."""
    return sorted({path for each in TEXTS for path in folder.glob(each) if path.is_file()})


def pass_on(folder: Path, out: Path) -> None:
    """Copy the texts in `folder` to `out`, but for those of which there is one already."""
    for path in licence_texts(folder):
        if not (out / path.name).is_file():
            with atomic_write(out / path.name) as part:
                shutil.copyfile(path, part)


def licence_of_dataset(repo: str, commit: str) -> Licence | None:
    """What the card of a data set on the hub says at that commit; None where it says nothing, or
    where there is neither a network nor a copy of it here."""
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
    except (OSError, ValueError, YAMLError):  # ValueError: no text, or no mapping
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
