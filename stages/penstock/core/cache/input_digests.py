"""Staleness check: content digests of the inputs that an artifact was built from.

A key names an input; a digest identifies its bytes. An input that was rebuilt under the same key
may have different bytes, and artifacts built from the earlier bytes are then stale. Records without
digests, from earlier versions, count as current.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.cache.manifest import MANIFEST, content_digest, read_manifest
from penstock.core.cache.record import Record, read_record, write_record
from penstock.core.cache.stage import ATTEMPT, Artifact, Stage, identity, short, stage_key

DIGESTS = "input_digests"
"""Field of an attempt's record: the content digest of each input artifact, by name."""


@dataclass(frozen=True)
class ChangedInput:
    """An input whose content differs from the content that the artifact was built from."""

    name: str
    stage: str
    key: str
    then: str  # The content digest that the artifact was built from
    now: str  # The current content digest

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.stage} {short(self.key)}) was built again with other content: "
            f"digest {short(self.then)} then, {short(self.now)} now"
        )


def digests_of_inputs(stage: Stage, remembered: Literal["all", "local"] = "all") -> dict[str, str]:
    """Return the content digest of each input artifact on this machine, by name. local: skip
    mirrors of remote artifacts, which may be out of date."""
    digests: dict[str, str] = {}
    for name, source in stage.inputs.items():
        if not isinstance(source, Artifact) or (remembered == "local" and source.remote):
            continue
        manifest = read_manifest(source.path)
        # A folder that the user chose (train.output_dir) may hold the result of other settings.
        if manifest and manifest["key"] == source.key:
            digests[name] = content_digest(manifest)
    return digests


def changed_inputs(
    stage: Stage, record: Mapping[str, Any], present: Mapping[str, str]
) -> list[ChangedInput]:
    """Return the inputs whose `present` digest differs from a manifest's or attempt record's."""
    then = _recorded_digests(record)
    return [
        ChangedInput(name, source.stage, source.key, then[name], present[name])
        for name, source in stage.inputs.items()
        if isinstance(source, Artifact)
        and name in then
        and name in present
        and then[name] != present[name]
    ]


def attempt_record(stage: Stage, digests: Mapping[str, str]) -> Record:
    """The record of an incomplete artifact."""
    return {**identity(stage), "key": stage_key(stage), DIGESTS: dict(digests)}


def read_attempt(folder: Path) -> Record | None:
    """Return the record of the incomplete artifact in `folder`, or None if there is none. Raises
    ArtifactError if the record is damaged."""
    path = folder / ATTEMPT
    remedy = f"Move {folder} aside, or delete it to begin again."
    try:
        return read_record(path, remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None


def recorded_identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of the stage that wrote a manifest or an attempt record."""
    inputs: dict[str, Any] = {
        name: entry["key"] if isinstance(entry, Mapping) else entry
        for name, entry in record["inputs"].items()
    }
    return {**{name: record[name] for name in ("stage", "version", "settings")}, "inputs": inputs}


def reopen(folder: Path) -> None:
    """Make a complete artifact an attempt again."""
    if manifest := read_manifest(folder):
        digests = dict(_recorded_digests(manifest))
        attempt = {**recorded_identity(manifest), "key": manifest["key"], DIGESTS: digests}
        # Before the manifest goes: a crash in between leaves both, and the folder is still
        # complete.
        write_record(folder / ATTEMPT, attempt)
        (folder / MANIFEST).unlink()


def _recorded_digests(record: Mapping[str, Any]) -> dict[str, str]:
    if DIGESTS in record:
        return record[DIGESTS]
    inputs: Mapping[str, Any] = record["inputs"]
    return {
        name: entry["digest"]
        for name, entry in inputs.items()
        if isinstance(entry, Mapping) and "digest" in entry
    }
