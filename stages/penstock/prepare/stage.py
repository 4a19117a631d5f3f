"""The prepare stage: records from outside become tokenised samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.core.files import read_json, remove, write_json
from penstock.core.stage import Facts, Source, Stage
from penstock.prepare.settings import PrepareSettings

STAGED = "tokenised"
"""Folder of an attempt: slices as they come from the tokenizer, before they are split."""


@dataclass(frozen=True)
class Prepare(Stage):
    """Sources in, samples out: `data/<split>/slice-<key>.arrow` and `plan.json`.

    Version 1: slices in source order; the order of samples is a plan (`penstock.rows.order`).
    """

    name: ClassVar[str] = "prepare"
    version: ClassVar[int] = 1

    settings: PrepareSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    sources: tuple[Source, ...]
    """One for each of settings.datasets."""
    test_sources: tuple[Source, ...]
    """One for each of settings.test_datasets."""
    tokenizer: Source
    tokenizer_path: str
    """How: where the tokenizer lies, as the user typed it."""
    num_proc: int = 1
    """How: processes that slices are spread over."""

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
            "tokenizer": self.tokenizer,
        }

    def run(self, out: Path) -> Facts:
        """Tokenise slice by slice, keeping those an earlier attempt has finished.

        Slices that sealed artifacts beside `out` hold are taken from there. Raises StageError when
        a source is unreadable, or more of its records unusable than the settings allow.
        """
        from penstock.prepare.plan import check_sources, facts_of, plan_of
        from penstock.prepare.reuse import restore
        from penstock.prepare.slices import plan_slices
        from penstock.prepare.split import publish_splits
        from penstock.prepare.tokenise import finished
        from penstock.prepare.workers import run_all
        from penstock.rows.prepared import PLAN

        staged = out / STAGED
        if not (out / PLAN).is_file():
            planned = plan_slices(self.settings, self.sources, self.test_sources, self.tokenizer)
            slices = [(item, staged / item.file) for item in planned]
            restore([pair for pair in slices if not finished(pair[1])], out.parent)
            missing = [pair for pair in slices if not finished(pair[1])]
            run_all(missing, self.tokenizer_path, self.tokenizer.pin.get("commit"), self.num_proc)
            done = [(item, target, finished(target)) for item, target in slices]
            results = [(item, target, tally) for item, target, tally in done if tally]
            check_sources(results, self.settings)
            publish_splits(results, self.settings, out)
            write_json(out / PLAN, plan_of(results, self.settings, out))
        remove(staged)
        return facts_of(read_json(out / PLAN))
