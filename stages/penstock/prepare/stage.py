"""The prepare stage: records from outside become tokenized samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.core.cache.stage import Facts, Source, Stage
from penstock.core.errors import StageError
from penstock.core.files import read_json, write_json
from penstock.core.remote.shared_files import SharedCache
from penstock.prepare.settings import PrepareSettings

SLICES = "slices"
"""Folder of a root for the slices that all runs share."""

if TYPE_CHECKING:
    from penstock.prepare.slices import Slice
    from penstock.prepare.workers import WorkerConfig


@dataclass(frozen=True)
class SliceProgress:
    """How far a share of the slices is."""

    slices: int
    """In the share; those that were there already are among them."""
    done: int
    """Of those, what the call that tells it tokenized, or found."""


@dataclass(frozen=True)
class Prepare(Stage):
    """Sources in, samples out: `data/<split>/slice-<key>.arrow` and `plan.json`.

    Version 2: slices in source order; the order of samples is a plan
    (`penstock.rows.sample_order`). Version 3: nulls within tools are kept as they are written, and
    masks of templates that render an earlier answer differently are found turn by turn.
    """

    name: ClassVar[str] = "prepare"
    version: ClassVar[int] = 3
    neutral: ClassVar[Mapping[str, Any]] = {"weight_unit": "samples"}

    settings: PrepareSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    sources: tuple[Source, ...]
    """One for each of settings.datasets."""
    test_sources: tuple[Source, ...]
    """One for each of settings.test_datasets."""
    tokenizer: Source
    tokenizer_path: str
    """How: where the tokenizer lies, as the user typed it."""
    decontaminate_sources: tuple[Source, ...] = ()
    """One for each of settings.decontaminate_datasets."""
    num_proc: int = 1
    """How: processes that slices are spread over."""
    hub_token: bool | None = None
    """How: whether the hub's login is used (true), not used (false), or used if there is one."""
    slices_path: Path | None = None
    """How: where tokenized slices are kept. Unset: `slices`, beside the stage's own folder."""
    slices_url: str | None = None
    """How: where they are kept for all machines, if the root lies behind a URL."""

    def __post_init__(self) -> None:
        """Sources and their settings come in pairs."""
        counts = (len(self.sources), len(self.test_sources))
        wanted = (len(self.settings.datasets), len(self.settings.test_datasets))
        if counts != wanted:
            raise ValueError(f"{counts} sources for {wanted} data sets")

    @property
    def inputs(self) -> Mapping[str, Source]:
        """The data, by role and place, and the tokenizer."""
        return {
            **{f"data.{index}": source for index, source in enumerate(self.sources)},
            **{f"test.{index}": source for index, source in enumerate(self.test_sources)},
            **{f"avoid.{index}": source for index, source in enumerate(self.decontaminate_sources)},
            "tokenizer": self.tokenizer,
        }

    def run(self, out: Path) -> Facts:
        """Tokenize the slices that no run has tokenized yet, then choose and lay out samples.

        Slices lie in a cache that all runs beside `out` share, so that an attempt goes on where
        another ended. Raises StageError when a source is unreadable, or more of its records
        unusable than the settings allow.
        """
        from penstock.prepare.plan import build_plan, check_sources, summarize_plan
        from penstock.prepare.select.select import select
        from penstock.prepare.split import publish_splits
        from penstock.prepare.workers import tokenize_missing
        from penstock.rows.prepared import PLAN

        if not (out / PLAN).is_file():
            slices, config = self._plan_slices(out)
            tokenize_missing(slices, config, self.num_proc)
            finished = [entry for entry in config.cache.lookup(slices) if entry]
            if len(finished) < len(slices):
                raise StageError(
                    f"{len(slices) - len(finished)} of {len(slices)} slices are gone from "
                    f"{config.cache.folder} since they were made.\n  Run again to make them anew."
                )
            check_sources(finished, self.settings)
            selection = select(finished, self.settings, workers=self.num_proc)
            publish_splits(finished, selection, self.settings, out)
            write_json(out / PLAN, build_plan(finished, selection, self.settings))
        return summarize_plan(read_json(out / PLAN))

    def prepare_share(self, out: Path, index: int, count: int) -> SliceProgress:
        """Tokenize those slices of share `index` (from 0) of `count` that are missing.

        `out` is the folder the stage will run in, later; nothing is written there. Any number of
        machines that see the same root may each do a share at once.
        """
        from penstock.prepare.slices import select_shard
        from penstock.prepare.workers import tokenize_missing

        if not 0 <= index < count:
            raise ValueError(f"share {index} of {count}: shares are counted from 0")
        slices, config = self._plan_slices(out)
        share = select_shard(slices, index, count)
        return SliceProgress(slices=len(share), done=tokenize_missing(share, config, self.num_proc))

    def progress(self, out: Path) -> SliceProgress:
        """All slices, and how many of them some run has tokenized already; nothing is made."""
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
            revision=self.tokenizer.pin.get("commit"),
            tokenizer_key=self.tokenizer.key,
            token=self.hub_token,
        )
        return self.slices(), config
