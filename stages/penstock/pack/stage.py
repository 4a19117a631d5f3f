"""The pack stage: prepared samples laid into rows of a fixed number of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock.core.stage import Artifact, Facts, Stage
from penstock.pack.settings import PackSettings


@dataclass(frozen=True)
class Pack(Stage):
    """Samples in, rows out: `data/<split>/rows-00000-of-0000N.arrow`.

    Version 1: rows without padding; labels shifted once, -100 at the end of every document.
    """

    name: ClassVar[str] = "pack"
    version: ClassVar[int] = 1

    settings: PackSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    prepared: Artifact

    @property
    def inputs(self) -> Mapping[str, Artifact]:
        """The prepared samples."""
        return {"prepared": self.prepared}

    def run(self, out: Path) -> Facts:
        """Pack each split shard by shard, keeping the shards an earlier attempt has finished.

        Raises StageError when a sample does not fit a row.
        """
        from penstock.pack.layout import lay_out
        from penstock.pack.shards import measure, write_shards
        from penstock.rows.prepared import PreparedSamples
        from penstock.rows.schema import SPLITS

        capacity = self.settings.sample_packing_sequence_len
        measured: dict[str, dict[str, Any]] = {}
        for split in SPLITS:
            samples = PreparedSamples(self.prepared.path, split)
            shards: list[Path] = []
            if len(samples):
                packing = lay_out(samples, self.settings)
                count = packing.num_shards(self.settings.num_shards)
                shards = write_shards(packing, out / "data" / split, count)
            measured[split] = {"shards": len(shards), **measure(shards, capacity)}
        names = measured["train"]
        return {name: {split: measured[split][name] for split in SPLITS} for name in names}
