"""What a run is trained on, kept in its own folder, for prepared and packed data may be pruned."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.core.cache.stage import Artifact
from penstock.core.files import read_json, write_json

DATA = "data.json"

LINEAGE = "lineage.json"
"""When that was made, and whether it was there already: what differs between runs of one key."""

BEGAN = datetime.now(UTC).isoformat(timespec="seconds")
"""When this process did: what was made before was there already."""


def keep_data_facts(out: Path, packed: Artifact, prepared: Artifact | None) -> None:
    """Write what the stages before said of their results, and of what they were made; the prepared
    one need not be here."""
    before = packed.manifest
    record: dict[str, Any] = {
        "packed": before["facts"],
        "prepared": None,
        "made": {"pack": {"key": before["key"], "settings": before["settings"]}},
    }
    try:
        first = prepared.manifest if prepared else None
    except FileNotFoundError:
        first = None
    if first:
        record["prepared"] = first["facts"]
        record["made"]["prepare"] = {"key": first["key"], "sources": _sources(first["inputs"])}
    write_json(out / DATA, record)
    made = {"pack": before, **({"prepare": first} if first else {})}
    write_json(out / LINEAGE, {name: _making(manifest) for name, manifest in made.items()})


def kept_data_facts(out: Path) -> dict[str, Any] | None:
    """The facts by stage; None for a run that kept none."""
    path = out / DATA
    return read_json(path) if path.is_file() else None


def kept_lineage(out: Path) -> dict[str, Any]:
    """When each stage's result was made, by stage; empty for a run that kept nothing of that."""
    path = out / LINEAGE
    return read_json(path) if path.is_file() else {}


def _making(manifest: dict[str, Any]) -> dict[str, Any]:
    created = manifest["created"]
    return {"created": created, "seconds": manifest["seconds"], "reused": created < BEGAN}


def _sources(inputs: dict[str, Any]) -> dict[str, Any]:
    """The pins of what was prepared, by name; of files their number, for there may be many."""
    found: dict[str, Any] = {}
    for name, each in inputs.items():
        pin = each["source"]
        found[name] = {**pin, "files": len(pin["files"])} if "files" in pin else pin
    return found
