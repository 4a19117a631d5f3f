"""The results of the stages of a run, with access to their data from Python."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.api.report import exported_model
from penstock.api.tables import html_table, outcome_rows, table
from penstock.core.cache.store import StageResult
from penstock.core.errors import ConfigError
from penstock.train.launch.job import METRICS, REPORT
from penstock.train.metrics.jsonl import read_metrics

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from penstock.rows.reader import PackedRows

Split = Literal["train", "validation"]


@dataclass(frozen=True, repr=False)
class Result(StageResult):
    """The result of a stage: `stage`, `key` (16 hex digits), `status` (`ran`, `resumed`, `cached`
    or `skipped`), `path`, `seconds` and `facts`, the counts in its manifest."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stage} {self.key}: {self.status}, {self.where})"

    def _repr_html_(self) -> str:
        return html_table(outcome_rows([self]))


@dataclass(frozen=True, repr=False)
class PreparedData(Result):
    """Tokenized samples, memory-mapped."""

    def dataset(self, split: Split = "train") -> "Dataset":
        """The samples of a split in stored order, memory-mapped.

        Columns are `input_ids` and `labels` (unshifted, -100 where masked; for pairs with
        `chosen_` and `rejected_` before them), `source`, the name of the data set, and `row`, the
        record's index in its slice.

        Raises ConfigError for a split that the run does not have, ArtifactError for damage.
        """
        from penstock.rows.prepared import PreparedSamples

        require_split(self, split)
        return _as_dataset(PreparedSamples(self.path, split).table(), f"{self.key}-{split}")


@dataclass(frozen=True, repr=False)
class PackedData(Result):
    """Packed rows, memory-mapped."""

    def rows(self, split: Split = "train") -> "PackedRows":
        """The packed rows of a split as the trainer reads them: `len(rows)`, and `rows.row(i)` with
        `input_ids`, `labels` (shifted once) and `lengths`, the tokens of each document.

        Raises ConfigError for a split that the run does not have, ArtifactError for damage.
        """
        from penstock.rows.reader import PackedRows

        require_split(self, split)
        return PackedRows(self.path / "data" / split)

    def dataset(self, split: Split = "train") -> "Dataset":
        """The same rows as a data set with the columns of the files.

        Raises ConfigError for a split that the run does not have, ArtifactError for damage.
        """
        return _as_dataset(self.rows(split).table(), f"{self.key}-{split}")


@dataclass(frozen=True, repr=False)
class Training(Result):
    """A finished training."""

    @property
    def report(self) -> Path:
        """`report.html`."""
        return self.path / REPORT

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`, one per logged step or evaluation, in order."""
        return list(read_metrics(self.path / METRICS))


@dataclass(frozen=True, repr=False)
class ExportedModel(Result):
    """A model in Hugging Face's format."""

    @property
    def folder(self) -> Path:
        """The folder for `from_pretrained`: `hf/`, or `adapter/` where only an adapter was
        exported."""
        folder = exported_model(self)
        assert folder, "an export has one of them"
        return folder


class RunResult(Mapping[str, Result]):
    """The results of a run by stage name, in order; displayed as a table."""

    def __init__(self, results: list[Result]) -> None:
        self._results = {result.stage: result for result in results}

    def __getitem__(self, stage: str) -> Result:
        return self._results[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        return table(outcome_rows(self._results.values()))

    def _repr_html_(self) -> str:
        return html_table(outcome_rows(self._results.values()))


KINDS: Mapping[str, type[Result]] = {
    "prepare": PreparedData,
    "pack": PackedData,
    "train": Training,
    "export": ExportedModel,
}
"""The result types of stages that have more than files."""


def as_result(outcome: StageResult) -> Result:
    """The outcome of a stage as its result type."""
    return KINDS.get(outcome.stage, Result)(**vars(outcome))


def require_split(result: StageResult, split: str) -> None:
    """Raise ConfigError for a split without rows."""
    rows: Mapping[str, int] = result.facts["rows"]
    if split not in rows:
        raise ConfigError(f"{split!r} is no split.\n  Splits are {', '.join(rows)}.")
    if not rows[split]:
        raise ConfigError(
            f"the {split} split has no rows.\n"
            "  Write data.val_set_size or data.test_datasets to have validation data."
        )


def _as_dataset(rows: "pa.Table", fingerprint: str) -> "Dataset":
    """The table as a Dataset; `source` is decoded, as `datasets` has no dictionary arrays."""
    import pyarrow as pa
    from datasets import Dataset

    if "source" in rows.column_names:
        column = rows.column_names.index("source")
        rows = rows.set_column(column, "source", rows.column("source").cast(pa.string()))
    # Without a fingerprint, `datasets` hashes all of the data.
    return Dataset(rows, fingerprint=fingerprint)
