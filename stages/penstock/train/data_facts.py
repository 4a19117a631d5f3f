"""What a run is trained on, kept in its own folder, for prepared and packed data may be pruned."""

from pathlib import Path
from typing import Any

from penstock.core.files import read_json, write_json
from penstock.core.stage import Artifact

DATA = "data.json"


def keep_data_facts(out: Path, packed: Artifact, prepared: Artifact | None) -> None:
    """Write what the stages before said of their results; the prepared one need not be here."""
    try:
        facts = prepared.facts if prepared else None
    except FileNotFoundError:
        facts = None
    write_json(out / DATA, {"packed": packed.facts, "prepared": facts})


def kept_data_facts(out: Path) -> dict[str, Any] | None:
    """The facts by stage; None for a run that kept none."""
    path = out / DATA
    return read_json(path) if path.is_file() else None
