"""Warnings about data size, row length and batch size, from counts, before training.

`findings` is a pure function; the plan, the start of training and its report print its results.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from penstock.config.schema.data import LastBatch
from penstock.config.schema.run import RunConfig

# Minimum optimizer steps; a run with fewer trains too little, whatever the data.
FEW_STEPS = 20

FEW_ROWS = Fraction(1, 20)
"""Maximum share of an epoch's rows that is dropped without a warning, and that `drop_few` drops."""

FEW_SAMPLES = Fraction(1, 100)
"""Maximum share of samples that is truncated, or dropped as too long, without a warning."""

# Rows this many times as long as the longest sample are longer than packing needs.
LONG_ROWS = 16

UNSELECTED = ("max_samples", "contaminated", "exact_duplicate", "near_duplicate")
"""Reasons that drop samples after they were tokenized, and truncated."""

# Settings that end a run early on purpose: the run length is not warned about.
STOPS = ("max_steps", "max_tokens", "max_hours", "eval_only", "early_stopping")


@dataclass(frozen=True)
class RunSize:
    """The counts that `findings` needs."""

    steps: int
    set_by: str
    """The setting that ends the run."""
    epochs: float
    """`train.num_train_epochs`."""
    rows: int
    """Packed rows per epoch; of the first epoch if epochs differ."""
    rows_per_step: int
    last_batch: LastBatch
    row_length: int
    longest: int
    """Upper bound on the tokens of a sample."""
    warmup_steps: int = 0
    samples: int = 0
    """Tokenized samples, including validation and those that are not selected."""
    cut: int = 0
    """Samples truncated to `max_seq_len`."""
    too_long: int = 0
    """Records dropped as too long."""
    packed_rows: int = 0
    """Packed rows of all planned epochs."""
    untrained_rows: int = 0
    """Those of them without a trained token."""

    @property
    def rows_dropped(self) -> int:
        """Rows of every epoch that are in no step (drop_last)."""
        remainder = self.rows % self.rows_per_step
        all_there_is = remainder == self.rows
        keeps = all_there_is or keeps_rest(self.rows, self.rows_per_step, self.last_batch)
        return 0 if keeps else remainder


@dataclass(frozen=True)
class Finding:
    """A warning about a setting: a machine-readable name and a one-line message."""

    name: str
    text: str

    def as_json(self) -> dict[str, str]:
        """As a JSON object."""
        return asdict(self)


def keeps_rest(rows: int, rows_per_step: int, last_batch: LastBatch) -> bool:
    """Whether an epoch of `rows`, at least one full step, ends with a step that is not full."""
    if last_batch == "drop_few":
        return rows % rows_per_step > FEW_ROWS * rows
    return last_batch == "keep"


def findings(size: RunSize) -> list[Finding]:
    """Warnings about the run size, most severe first."""
    if size.set_by == "eval_only":
        return []
    return [
        *_few_steps(size),
        *_long_rows(size),
        *_batch_over_epoch(size),
        *_rows_dropped(size),
        *_untrained_rows(size),
        *_long_warmup(size),
        *_samples_cut(size),
    ]


def run_size(
    run: RunConfig,
    *,
    packed: Mapping[str, Any],
    prepared: Mapping[str, Any] | None,
    steps: int,
    set_by: str,
    rows_per_step: int,
) -> RunSize:
    """Collect the counts of a run from the facts of the pack and prepare stages."""
    train, prepared = run.train, prepared or {}
    dropped: Mapping[str, int] = prepared.get("dropped", {})
    lengths: Mapping[str, int] = packed["lengths"]["train"]
    epoch_rows: list[int] = packed.get("epoch_rows", {}).get("train") or [packed["rows"]["train"]]
    fallback = run.data.row_length
    return RunSize(
        steps=steps,
        set_by=set_by,
        epochs=train.num_train_epochs,
        rows=epoch_rows[0],
        rows_per_step=rows_per_step,
        last_batch=run.data.last_batch,
        row_length=packed.get("row_length", {}).get("train", fallback),
        longest=max(map(int, lengths), default=0),
        warmup_steps=train.warmup_steps(steps),
        samples=sum(prepared.get("rows", {}).values()) + sum(dropped.get(r, 0) for r in UNSELECTED),
        cut=prepared.get("truncated", 0),
        too_long=dropped.get("too_long", 0),
        packed_rows=sum(epoch_rows),
        untrained_rows=packed.get("untrained_rows", {}).get("train", 0),
    )


def row_length_line(run: RunConfig, length: int) -> str | None:
    """Log line about a row length chosen from the samples; None if the config sets it."""
    if run.data.sample_packing_sequence_len is not None:
        return None
    return (
        f"rows of {length:,} tokens, chosen from the samples; "
        f"write data.sample_packing_sequence_len for another length"
    )


def _few_steps(size: RunSize) -> Iterator[Finding]:
    if size.set_by in STOPS or size.steps >= FEW_STEPS:
        return
    remedies: list[str] = []
    if size.row_length > 2 * size.longest:
        remedies.append(_shorter_rows(size))
    if size.rows_per_step > 1:
        remedies.append(f"lower train.global_batch_size ({size.rows_per_step} rows a step)")
    remedies.append(f"raise train.num_train_epochs ({size.epochs:g})")
    yield Finding(
        "few_steps",
        f"the run is {_count(size.steps, 'optimizer step')}, which trains "
        f"little (fewer than {FEW_STEPS}): {_count(size.rows, 'row')} an epoch, "
        f"{size.rows_per_step} a step; "
        f"{_either(remedies)}",
    )


def _long_rows(size: RunSize) -> Iterator[Finding]:
    few = size.steps < FEW_STEPS and size.set_by not in STOPS
    if few or not size.longest or size.row_length < LONG_ROWS * size.longest:
        return
    if size.steps >= 10 * FEW_STEPS:
        return
    yield Finding(
        "long_rows",
        f"rows have {size.row_length:,} tokens, and no sample more than {size.longest:,}: "
        f"{_count(size.rows, 'row')} an epoch; {_shorter_rows(size)} for more and smaller steps",
    )


def _batch_over_epoch(size: RunSize) -> Iterator[Finding]:
    if size.rows >= size.rows_per_step:
        return
    yield Finding(
        "batch_over_epoch",
        f"a step takes {_count(size.rows_per_step, 'row')}, and an epoch has {size.rows}: every "
        "step is a whole epoch, and smaller than asked for; lower train.global_batch_size, or "
        "train.micro_batch_size and train.gradient_accumulation_steps",
    )


def _rows_dropped(size: RunSize) -> Iterator[Finding]:
    if size.rows_dropped <= FEW_ROWS * size.rows:
        return
    yield Finding(
        "rows_dropped",
        f"{size.rows_dropped} of {size.rows} rows ({size.rows_dropped / size.rows:.0%}) are "
        f"dropped from every epoch, because they do not fill a step of {size.rows_per_step}; write "
        "data.dataloader_drop_last: false to train on them",
    )


def _untrained_rows(size: RunSize) -> Iterator[Finding]:
    if not size.untrained_rows:
        return
    share = size.untrained_rows / size.packed_rows
    # Expected steps without any trained row, if rows are drawn independently.
    steps = size.steps * share**size.rows_per_step
    expected = f", about {steps:,.0f} of {size.steps:,} here" if steps >= 1 else ""
    yield Finding(
        "untrained_rows",
        f"{size.untrained_rows:,} of {_count(size.packed_rows, 'packed row')} ({share:.1%}) have "
        "no trained token, and a step that has only such rows has no loss"
        f"{expected}; raise train.global_batch_size or data.sample_packing_sequence_len, or write "
        "data.sample_packing_method: multipack, or data.truncation_mode: keep_end",
    )


def _long_warmup(size: RunSize) -> Iterator[Finding]:
    if not size.warmup_steps or size.warmup_steps < size.steps:
        return
    yield Finding(
        "long_warmup",
        f"the learning rate warms up for {_count(size.warmup_steps, 'step')}, and the run ends "
        f"after {size.steps}: it never reaches train.lr; lower train.lr_warmup_steps or "
        "train.lr_warmup_ratio",
    )


def _samples_cut(size: RunSize) -> Iterator[Finding]:
    total = size.samples + size.too_long
    if size.cut > FEW_SAMPLES * total:
        yield Finding(
            "samples_cut",
            f"{size.cut:,} of {total:,} samples ({size.cut / total:.1%}) were truncated to "
            "data.datasets.*.max_seq_len; raise it, or see data.truncation_mode",
        )
    if size.too_long > FEW_SAMPLES * total:
        yield Finding(
            "samples_too_long",
            f"{size.too_long:,} of {total:,} samples ({size.too_long / total:.1%}) were dropped, "
            "longer than data.datasets.*.max_seq_len; raise it, or write data.truncation_mode: "
            "keep_start to truncate them",
        )


def _shorter_rows(size: RunSize) -> str:
    return (
        f"lower data.sample_packing_sequence_len ({size.row_length:,}; no sample has more than "
        f"{size.longest:,} tokens)"
    )


def _either(remedies: list[str]) -> str:
    return remedies[0] if len(remedies) == 1 else f"{', '.join(remedies[:-1])}, or {remedies[-1]}"


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"
