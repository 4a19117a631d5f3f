"""Run lineage, from the run's own folder: its manifest, and facts of the data, which may have been
deleted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.cache.data_facts import read_data_facts
from penstock.core.cache.stage import Artifact

Record = dict[str, Any]

ROLES = {"train": ("training", "data"), "validation": ("held out", "test")}
"""The use of a source, and the prepare stage's input names of that kind."""


@dataclass(frozen=True)
class Lineage:
    """Records of the stages before the export; each may be empty."""

    keys: dict[str, str]  # Cache keys by stage, in order
    train: Record  # The manifest of the train stage
    packed: Record  # Facts of the packed data
    packing: Record  # Settings of the pack stage
    prepared: Record  # Facts of the prepared data
    pins: Record  # Source pins by input name of the prepare stage

    @classmethod
    def of(cls, trained: Artifact) -> "Lineage":
        manifest, data = trained.manifest, read_data_facts(trained.path) or {}
        made_with: Record = data.get("made", {})
        prepare, pack = made_with.get("prepare", {}), made_with.get("pack", {})
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
        """Facts of each source that contributed samples, with `use` and `pin`."""
        return [
            {**source, "use": ROLES[source["role"]][0], "pin": self._pin(source)}
            for source in self.prepared.get("sources", [])
            if source["role"] in ROLES
        ]

    @property
    def datasets(self) -> list[str]:
        """Hub names of the training data sets, unique and sorted."""
        pins = [source["pin"] for source in self.sources if source["role"] == "train"]
        return sorted({pin["repo"] for pin in pins if pin.get("kind") == "hub"})

    def _pin(self, source: Record) -> Record:
        return self.pins.get(f"{ROLES[source['role']][1]}.{source['dataset']}", {})


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in the folder has a chat template."""
    config = folder / "tokenizer_config.json"
    in_config = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    return in_config or any(folder.glob("chat_template.*"))
