"""What a result was made from, by content: a key names an input, and a digest says what it held.

An input that was built again under the same key may have other bytes. What was made from the
earlier ones is stale then. Records without digests, which are older, are taken to be current.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.cache.manifest import content_digest, read_manifest
from penstock.core.cache.record import Record, read_record
from penstock.core.cache.stage import ATTEMPT, Artifact, Stage, identity, short, stage_key

DIGESTS = "input_digests"
"""Field of an attempt's record: the content digest of each input that is a result, by name."""

UNDIGESTED_ATTEMPT = frozenset({"stage", "version", "settings", "inputs", "key"})
"""Fields of attempts that were written before records had a digest."""


@dataclass(frozen=True)
class ChangedInput:
    """An input whose content is not what a result was made from."""

    name: str
    stage: str
    key: str
    then: str
    """The content digest that the result was made from."""
    now: str
    """The content digest of what is there."""

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.stage} {short(self.key)}) was built again with other content: "
            f"digest {short(self.then)} then, {short(self.now)} now"
        )


def digests_of_inputs(stage: Stage, known: Literal["all", "local"] = "all") -> dict[str, str]:
    """The content digest of each input that is a result and is on this machine, by name.

    local: not of mirrors of what lies behind a URL, which may be older than that.
    """
    found: dict[str, str] = {}
    for name, source in stage.inputs.items():
        if not isinstance(source, Artifact) or (known == "local" and source.remote):
            continue
        manifest = read_manifest(source.path)
        if manifest and manifest["key"] == source.key:
            found[name] = content_digest(manifest)
    return found


def changed_inputs(
    stage: Stage, record: Mapping[str, Any], present: Mapping[str, str]
) -> list[ChangedInput]:
    """The inputs whose `present` digests differ from those in a manifest or an attempt's record."""
    then = _recorded(record)
    return [
        ChangedInput(name, source.stage, source.key, then[name], present[name])
        for name, source in stage.inputs.items()
        if isinstance(source, Artifact)
        and name in then
        and name in present
        and then[name] != present[name]
    ]


def attempt_record(stage: Stage, digests: Mapping[str, str]) -> Record:
    """What an unfinished result says of itself."""
    return {**identity(stage), "key": stage_key(stage), DIGESTS: dict(digests)}


def read_attempt(folder: Path) -> Record | None:
    """The record of the unfinished result in `folder`, or None where there is none.

    Raises ArtifactError for one that is damaged.
    """
    path = folder / ATTEMPT
    remedy = f"Move {folder} aside, or delete it to begin again."
    try:
        return read_record(path, UNDIGESTED_ATTEMPT, remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _recorded(record: Mapping[str, Any]) -> dict[str, str]:
    if DIGESTS in record:
        return record[DIGESTS]
    inputs: Mapping[str, Any] = record["inputs"]
    return {
        name: each["digest"]
        for name, each in inputs.items()
        if isinstance(each, Mapping) and "digest" in each
    }
