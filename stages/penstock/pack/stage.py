"""The pack stage: prepared samples to packed rows of a fixed maximum length."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from penstock.core.cache.stage import Artifact, Facts, Stage
from penstock.core.files import read_json
from penstock.pack.settings import PackSettings

OPTIONAL_FACTS = ("untrained_rows", "sources", "images", "image_tokens")
"""Facts that are left out where no split has any."""


@dataclass(frozen=True)
class Pack(Stage):
    """Input: prepared samples. Output: `data/<split>/rows-00000-of-0000N.arrow`.

    Version 1: rows without padding; labels shifted by one, -100 at the end of every document.
    Version 2: `multipack` mixes lengths; each planned epoch has its own rows, epoch after epoch;
    the fact `epoch_rows` has their numbers.
    Version 3: `sources.json` has the data set of each validation document, if there are several.
    """

    name: ClassVar[str] = "pack"
    version: ClassVar[int] = 3
    neutral: ClassVar[Mapping[str, Any]] = {
        "share_prompts": True,
        "row_length": "written",
        "row_multiple": 128,
        "rows_per_step": None,
        "kl_pairing": None,
        "kl_rotation_size": None,
        "kl_max_len": None,
    }

    settings: PackSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    prepared: Artifact

    num_proc: int = 1
    """Number of processes that write files."""

    start_method: Literal["fork", "spawn", "forkserver"] = "spawn"
    """How those processes are started."""

    encoded: Artifact | None = None
    """Features of the images, in place of their tensors."""

    @property
    def inputs(self) -> Mapping[str, Artifact]:
        """The prepared samples, and the features of their images where they are encoded."""
        inputs = {"prepared": self.prepared}
        return {**inputs, "encoded": self.encoded} if self.encoded else inputs

    def resolved(self) -> PackSettings:
        """The settings with a fitted row length resolved. Requires the prepared samples; depends
        only on the cache key."""
        if self.settings.row_length == "written":
            return self.settings
        from penstock.rows.prepared import PLAN
        from penstock.rows.row_length import SampleSizes, fitted_row_length

        sizes = SampleSizes.of_plan(read_json(self.prepared.path / PLAN))
        settings = self.settings
        most, multiple = settings.sample_packing_sequence_len, settings.row_multiple
        length = fitted_row_length(sizes, most, multiple, settings.rows_per_step)
        return settings.model_copy(
            update={"sample_packing_sequence_len": length, "row_length": "written"}
        )

    def run(self, out: Path) -> Facts:
        """Pack each split, keeping the files of an earlier attempt.

        Raises StageError if a sample does not fit in a row, or a KTO split has only one sample.
        """
        from penstock.rows.schema import SPLITS

        settings = self.resolved()
        measured = {split: self._split(out, split, settings) for split in SPLITS}
        self._link_images(out)
        facts = {name: {s: measured[s][name] for s in SPLITS} for name in measured[SPLITS[0]]}
        return {
            name: values
            for name, values in facts.items()
            if name not in OPTIONAL_FACTS or any(values.values())
        }

    def _link_images(self, out: Path) -> None:
        from penstock.core.cache.digest_cache import keep_cached_across_links
        from penstock.core.cache.manifest import listed_files
        from penstock.core.files import link
        from penstock.rows.image_files import MEDIA

        # Linked, so that the result needs no other.
        source = self.encoded or self.prepared
        files = listed_files(source.path / MEDIA, "*.arrow")
        if files:
            (out / MEDIA).mkdir(parents=True, exist_ok=True)
        with keep_cached_across_links(files):
            for file in files:
                link(file, out / MEDIA / file.name)

    def _split(self, out: Path, split: str, settings: PackSettings) -> dict[str, Any]:
        """Write the files of a split and return its facts. `fill` is tokens divided by the capacity
        of the rows; `shared_tokens` are prompt tokens shared by two completions."""
        import numpy as np

        from penstock.pack.plan_rows import (
            build_row_samples,
            count_sources,
            packing_method,
            plan_rows,
        )
        from penstock.pack.spread import Workers, plan_shards, write_shards
        from penstock.rows.prepared import PreparedSamples
        from penstock.rows.schema import histogram
        from penstock.rows.sources import Sources

        samples = PreparedSamples(self.prepared.path, split)
        form = build_row_samples(samples, settings)
        row_plan = plan_rows(form, settings, packing_method(split, settings))
        folder = out / "data" / split
        shards = plan_shards(self.prepared.path, split, row_plan, folder, settings)
        written = write_shards(shards, Workers(self.num_proc, self.start_method))
        if split == "validation" and len(labels := samples.labels()) > 1:
            datasets = samples.datasets()[row_plan.bins.samples].repeat(form.documents_per_sample)
            Sources.from_datasets(datasets, labels).write(folder)
        documents = form.document_lengths(row_plan.bins.samples, row_plan.sizes)
        tokens, rows = int(documents.sum()), len(row_plan.bins)
        capacity = rows * settings.sample_packing_sequence_len
        trained = np.concatenate([np.empty(0, np.int64), *(stats.trained for stats in written)])
        totals = np.concatenate([[0], np.cumsum(trained)])[row_plan.bins.ends]
        untrained = int(np.count_nonzero(np.diff(totals, prepend=0) == 0))
        sources = count_sources(samples, row_plan, trained, capacity)
        return {
            "row_length": settings.sample_packing_sequence_len,
            "shards": len(shards),
            "rows": rows,
            "epoch_rows": row_plan.epoch_rows,
            "documents": len(documents),
            "tokens": tokens,
            "trained_tokens": int(trained.sum()),
            "untrained_rows": untrained,
            "sources": sources if len(sources) > 1 else [],
            "max_token_id": max((stats.max_token_id for stats in written), default=0),
            "fill": round(tokens / capacity, 6) if rows else 0.0,
            "lengths": histogram(documents),
            **form.facts(row_plan.bins.samples),
        }
