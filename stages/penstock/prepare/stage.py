"""The prepare stage: data sets to tokenized samples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.core.cache.stage import Facts, Source, Stage
from penstock.core.errors import StageError
from penstock.core.files import write_json
from penstock.core.remote.shared_files import SharedCache
from penstock.prepare.settings import DatasetSettings, PrepareSettings

SLICES = "slices"
"""Subfolder of the root with the slices that all runs share."""

if TYPE_CHECKING:
    from penstock.prepare.slices import Slice
    from penstock.prepare.workers import WorkerConfig


@dataclass(frozen=True)
class SliceProgress:
    """How many slices are tokenized."""

    slices: int
    """Number of slices, including those that were tokenized already."""
    done: int
    """From `prepare_share`: the slices that the call tokenized; from `progress`: all tokenized
    ones."""


@dataclass(frozen=True)
class Prepare(Stage):
    """Input: data sources. Output: `data/<split>/slice-<key>.arrow` and `plan.json`.

    Version 2: slices keep source order; samples are shuffled by index
    (`penstock.rows.sample_order`). Version 3: nulls in tools are kept, and conversations whose chat
    template renders earlier answers differently are rendered turn by turn. Version 4: conversations
    have the tokens of their whole text, and a turn ends with one stop token. Version 5:
    tokenized records have the loss weights of their column.
    """

    name: ClassVar[str] = "prepare"
    version: ClassVar[int] = 5
    neutral: ClassVar[Mapping[str, Any]] = {"weight_unit": "samples", "split_by": None}

    settings: PrepareSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    sources: tuple[Source, ...]
    """One for each of settings.datasets."""
    test_sources: tuple[Source, ...]
    """One for each of settings.test_datasets."""
    tokenizer: Source
    tokenizer_path: str
    """How: path or hub id of the tokenizer, as the user wrote it."""
    decontaminate_sources: tuple[Source, ...] = ()
    """One for each of settings.decontaminate_datasets."""
    num_proc: int = 1
    """How: number of tokenization processes."""
    hub_token: bool | None = None
    """How: use the Hugging Face login (True), do not (False), or use it if there is one (None)."""
    slices_path: Path | None = None
    """How: folder of the slice cache. None: `slices`, beside the stage's own folder."""
    slices_url: str | None = None
    """How: URL of the slice cache shared by all machines, if the root is a URL."""

    def __post_init__(self) -> None:
        """Raise ValueError unless each source has settings."""
        counts = (len(self.sources), len(self.test_sources))
        num_sources = (len(self.settings.datasets), len(self.settings.test_datasets))
        if counts != num_sources:
            raise ValueError(f"{counts} sources for {num_sources} data sets")

    @property
    def inputs(self) -> Mapping[str, Source]:
        """The data sources, by role and index, and the tokenizer."""
        return {
            **{f"data.{index}": source for index, source in enumerate(self.sources)},
            **{f"test.{index}": source for index, source in enumerate(self.test_sources)},
            **{f"avoid.{index}": source for index, source in enumerate(self.decontaminate_sources)},
            "tokenizer": self.tokenizer,
        }

    def run(self, out: Path) -> Facts:
        """Tokenize the slices that are not in the cache, then filter samples and write the splits.

        All runs beside `out` share the slice cache, so a new attempt continues where another one
        stopped. Raises StageError if a source cannot be read, or more of its records are unusable
        than the settings allow.
        """
        # Imported where they are used, so that planning a finished run loads no pyarrow.
        from penstock.prepare.plan import build_plan, check_sources, summarize_plan
        from penstock.prepare.readers.image_pins import require_unchanged_source
        from penstock.prepare.select.select import select
        from penstock.prepare.split import publish_splits
        from penstock.prepare.workers import tokenize_missing
        from penstock.rows.prepared import PLAN

        slices, config = self._plan_slices(out)
        tokenize_missing(slices, config, self.num_proc)
        # Looked up again, as some were tokenized by other processes, or by other runs meanwhile.
        finished = [entry for entry in config.cache.lookup(slices) if entry]
        if len(finished) < len(slices):
            raise StageError(
                f"{len(slices) - len(finished)} of {len(slices)} slices were deleted from "
                f"{config.cache.folder} during this run.\n  Run again to tokenize them again."
            )
        # Workers check the images of slices that they tokenize; here are those of cached ones, too.
        for source, dataset in self._datasets():
            require_unchanged_source(source, dataset, self.settings.select_columns, self.hub_token)
        check_sources(finished, self.settings)
        selection = select(finished, self.settings, workers=self.num_proc, token=self.hub_token)
        publish_splits(finished, selection, self.settings, out)
        plan = build_plan(finished, selection, self.settings)
        write_json(out / PLAN, plan)
        return summarize_plan(plan)

    def _datasets(self) -> Iterator[tuple[Source, DatasetSettings]]:
        settings = self.settings
        yield from zip(self.sources, settings.datasets, strict=True)
        yield from zip(self.test_sources, settings.test_datasets, strict=True)
        yield from zip(self.decontaminate_sources, settings.decontaminate_datasets, strict=True)

    def prepare_share(self, out: Path, index: int, count: int) -> SliceProgress:
        """Tokenize the missing slices of share `index` (from 0) of `count`.

        `out` is the stage's output folder of a later run; nothing is written there. Machines with
        the same root may tokenize shares at the same time.
        """
        from penstock.prepare.slices import select_shard
        from penstock.prepare.workers import tokenize_missing

        if not 0 <= index < count:
            raise ValueError(f"share {index} of {count}: shares are counted from 0")
        slices, config = self._plan_slices(out)
        share = select_shard(slices, index, count)
        return SliceProgress(slices=len(share), done=tokenize_missing(share, config, self.num_proc))

    def progress(self, out: Path) -> SliceProgress:
        """Number of slices, and how many are in the cache; tokenizes nothing."""
        slices, config = self._plan_slices(out)
        config.cache.exchange(slices)
        done = [entry for entry in config.cache.lookup(slices) if entry]
        return SliceProgress(slices=len(slices), done=len(done))

    def slices(self) -> "list[Slice]":
        """The slices of all sources, in order. Raises what `plan_slices` raises."""
        from penstock.prepare.slices import plan_slices

        return plan_slices(
            self.settings,
            self.sources,
            self.test_sources,
            self.decontaminate_sources,
            self.tokenizer,
            token=self.hub_token,
        )

    def _plan_slices(self, out: Path) -> "tuple[list[Slice], WorkerConfig]":
        from penstock.prepare.slice_cache import SliceCache
        from penstock.prepare.workers import WorkerConfig

        folder = self.slices_path or out.parent.parent / SLICES
        config = WorkerConfig(
            cache=SliceCache(
                folder, SharedCache(self.slices_url, folder) if self.slices_url else None
            ),
            tokenizer=self.tokenizer_path,
            pinned=self.tokenizer,
            token=self.hub_token,
        )
        return self.slices(), config
