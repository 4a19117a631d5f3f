"""Data provenance: facts about the training data, copied into the run folder because prepared and
packed data may be pruned."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.core.cache.stage import Artifact
from penstock.core.files import read_json, write_json

DATA = "data.json"

# When the artifact was built and whether it was reused. Runs of one key may differ in these fields.
LINEAGE = "lineage.json"

PROCESS_START = datetime.now(UTC).isoformat(timespec="seconds")
"""Build time of this process, for artifacts that it built rather than reused."""


def write_data_facts(out: Path, packed: Artifact, prepared: Artifact | None) -> None:
    """Write the facts and inputs of the prepare and pack artifacts. The prepared artifact may be
    missing on this machine."""
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
    built = {"pack": before, **({"prepare": first} if first else {})}
    lineage: dict[str, Any] = {}
    for name, manifest in built.items():
        created = manifest["created"]
        # Both are ISO 8601 in UTC with whole seconds: such texts sort as their times do.
        reused = created < PROCESS_START
        lineage[name] = {"created": created, "seconds": manifest["seconds"], "reused": reused}
    write_json(out / LINEAGE, lineage)


def read_data_facts(out: Path) -> dict[str, Any] | None:
    """Return the facts by stage, or None if the run stored none."""
    path = out / DATA
    return read_json(path) if path.is_file() else None


def read_lineage(out: Path) -> dict[str, Any]:
    """Return build times by stage; empty if the run stored none."""
    path = out / LINEAGE
    return read_json(path) if path.is_file() else {}


def _sources(inputs: dict[str, Any]) -> dict[str, Any]:
    # Only the number of local files, of which there may be many.
    sources: dict[str, Any] = {}
    for name, record in inputs.items():
        pin = record["source"]
        sources[name] = {**pin, "files": len(pin["files"])} if "files" in pin else pin
    return sources
