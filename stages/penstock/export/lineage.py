"""What is known of how a run came about, from what its own folder keeps: its manifest, and facts of
the data, which may be gone by now."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.cache.data_facts import kept_data_facts
from penstock.core.cache.stage import Artifact

Record = dict[str, Any]

ROLES = {"train": ("training", "data"), "validation": ("held out", "test")}
"""What a source is for, and what the prepare stage calls its inputs of that kind."""


@dataclass(frozen=True)
class Lineage:
    """Records of the stages before the export; each may be empty."""

    keys: dict[str, str]
    """By stage, in order."""
    train: Record
    """The manifest of the train stage."""
    packed: Record
    """Facts of the packed data."""
    packing: Record
    """Settings of the pack stage."""
    prepared: Record
    """Facts of the prepared data."""
    pins: Record
    """By input of the prepare stage: what a source was pinned to."""

    @classmethod
    def of(cls, trained: Artifact) -> "Lineage":
        """That of a sealed run."""
        manifest, data = trained.manifest, kept_data_facts(trained.path) or {}
        made: Record = data.get("made", {})
        prepare, pack = made.get("prepare", {}), made.get("pack", {})
        keys = {
            "prepare": prepare.get("key"),
            "pack": pack.get("key"),
            "train": trained.key,
        }
        return cls(
            keys={stage: key for stage, key in keys.items() if key},
            train=manifest,
            packed=data.get("packed") or {},
            packing=pack.get("settings") or {},
            prepared=data.get("prepared") or {},
            pins=prepare.get("sources") or {},
        )

    @property
    def sources(self) -> list[Record]:
        """Facts of each source that gave samples; `use` says for what, `pin` where it was."""
        return [
            {**each, "use": ROLES[each["role"]][0], "pin": self._pin(each)}
            for each in self.prepared.get("sources", [])
            if each["role"] in ROLES
        ]

    @property
    def datasets(self) -> list[str]:
        """The hub's names of the data sets trained on, each once, sorted."""
        pins = [each["pin"] for each in self.sources if each["role"] == "train"]
        return sorted({pin["repo"] for pin in pins if pin.get("kind") == "hub"})

    def _pin(self, source: Record) -> Record:
        return self.pins.get(f"{ROLES[source['role']][1]}.{source['dataset']}", {})


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in the folder knows how messages are written."""
    config = folder / "tokenizer_config.json"
    said_within = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    return said_within or any(folder.glob("chat_template.*"))
