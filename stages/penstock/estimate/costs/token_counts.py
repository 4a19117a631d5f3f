"""Tokens and steps of a run: counted if its data is prepared, else estimated. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from penstock.config.schema.data import DataConfig
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import PlannedStage, find_cached
from penstock.estimate.costs.file_sizes import FileSizes, estimate_samples
from penstock.estimate.machine import rows_per_step_to_pack
from penstock.models.decoder_config import DecoderConfig
from penstock.models.flops import Work
from penstock.prepare.settings import MixSettings
from penstock.prepare.stage import Prepare
from penstock.rows.row_length import SampleSizes, fitted_row_length
from penstock.rows.sizing import keeps_rest

ASSUMED_PACKING_EFFICIENCY = 0.97
"""Assumed packing efficiency (share of row capacity with tokens) before data is packed."""

WHOLE_SAMPLES = 8
"""With fewer samples in a row, what is left of it is too short for another one."""

GROUPING = ("multipack", "greedy")
"""Packing methods that pack `sample_packing_group_size` samples at a time."""

SPREAD_PREPARED, SPREAD_SOURCES = 1.2, 1.7
"""Factor by which estimated rows may be wrong: of prepared samples, whose lengths differ, and of
source files, whose tokens are estimated from their characters without a chat template."""

Certainty = Literal["counted", "estimated"]


@dataclass(frozen=True)
class Data:
    """The training split."""

    epoch_rows: tuple[int, ...]
    """Packed rows of each epoch; epochs cycle through them."""
    tokens: int
    """Tokens of all these rows, without padding."""
    documents: int
    trained_tokens: int
    """Number of tokens with a label."""
    certainty: Certainty
    image_tokens: int = 0
    """Number of image tokens; 0 also before images are packed."""
    spread: float = 1.0
    """Factor by which the rows may be more or fewer."""

    @property
    def rows(self) -> int:
        """Rows of all packed epochs."""
        return sum(self.epoch_rows)

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens per row."""
        return self.tokens / max(1, self.rows)


@dataclass(frozen=True)
class Length:
    """Duration of a run in steps and tokens."""

    steps: int
    tokens: int
    set_by: str
    """The setting that ends the run."""
    certain: Certainty
    least: int
    most: int
    """Range of the steps, where they are estimated."""


@dataclass(frozen=True)
class DataFacts:
    """Facts of the prepare and pack stages; None if a result is not cached."""

    prepared: Mapping[str, Any] | None
    packed: Mapping[str, Any] | None

    @classmethod
    def read(cls, steps: Sequence[PlannedStage]) -> "DataFacts":
        """Read the facts from the planned stages of a run."""
        step_by_name = {step.stage.name: step for step in steps}
        manifests = [
            find_cached(step_by_name[n]) if n in step_by_name else None for n in ("prepare", "pack")
        ]
        return cls(*(manifest["facts"] if manifest else None for manifest in manifests))


def with_row_length(
    run: RunConfig, facts: DataFacts, steps: Sequence[PlannedStage], vocab_size: int
) -> RunConfig:
    """The run with its row length set from the data, if the config does not set it.

    Before data is prepared, the row length is estimated from the source files.
    """
    if run.data.sample_packing_sequence_len is not None:
        return run
    most, multiple = run.data.row_length, run.data.pad_to_multiple_of
    per_step = rows_per_step_to_pack(run)
    if facts.packed:
        length = facts.packed.get("row_length", {}).get("train", most)
    elif facts.prepared:
        length = fitted_row_length(SampleSizes.of_facts(facts.prepared), most, multiple, per_step)
    else:
        sizes = _estimate_sources(steps, vocab_size)
        if sizes is None:
            return run
        samples = SampleSizes(sizes.longest, sizes.tokens, sizes.samples)
        length = fitted_row_length(samples, most, multiple, per_step)
    return run.with_row_length(length)


def estimate_data(run: RunConfig, steps: Sequence[PlannedStage], vocab_size: int) -> Data | None:
    """Data counts from packed rows, prepared samples, or source files; None without any of them."""
    read_facts = DataFacts.read(steps)
    if read_facts.packed:
        facts = {name: of.get("train") for name, of in read_facts.packed.items()}
        rows = facts["epoch_rows"] or [facts["rows"]]
        counts = facts["tokens"], facts["documents"], facts["trained_tokens"]
        return Data(tuple(rows), *counts, "counted", facts.get("image_tokens") or 0)
    if read_facts.prepared:
        facts = {name: read_facts.prepared[name]["train"] for name in COUNTED}
        counts = facts["tokens"], facts["rows"], facts["trained_tokens"]
        rows = _estimate_rows(run.data, *counts[:2])
        return Data((rows,), *counts, "estimated", spread=SPREAD_PREPARED)
    sizes = _estimate_sources(steps, vocab_size)
    if sizes is None:
        return None
    trained = _training_share(run.data.val_set_size, sizes.samples)
    tokens, samples = math.ceil(trained * sizes.tokens), round(trained * sizes.samples)
    rows = _estimate_rows(run.data, tokens, samples)
    counts = tokens, samples, tokens
    return Data((rows,), *counts, "estimated", spread=SPREAD_SOURCES)


def _estimate_sources(steps: Sequence[PlannedStage], vocab_size: int) -> FileSizes | None:
    prepare = next((step.stage for step in steps if step.stage.name == "prepare"), None)
    if not isinstance(prepare, Prepare):
        return None
    mix = prepare.settings.mix or (MixSettings(),) * len(prepare.sources)
    read = [pair for pair in zip(prepare.sources, mix, strict=True) if pair[1].weight]
    limits = [settings.max_samples for _, settings in read]
    return estimate_samples([source for source, _ in read], vocab_size, limits)


def _training_share(held_out: float | None, samples: int) -> float:
    """The share of samples that is not held out: `val_set_size` is a number of them, or a share."""
    share = held_out or 0.0
    return max(0.0, 1 - (share if share < 1 else share / max(1, samples)))


def _estimate_rows(data: DataConfig, tokens: int, samples: int) -> int:
    """Rows for samples of equal length, which are not split over rows."""
    if data.packing_method in GROUPING and data.sample_packing_group_size == 1:
        return max(1, samples)
    length = data.row_length
    fit = length * samples // max(1, tokens)
    rows = samples / fit if 0 < fit < WHOLE_SAMPLES else 0
    return max(1, math.ceil(max(rows, tokens / (length * ASSUMED_PACKING_EFFICIENCY))))


COUNTED = ("rows", "tokens", "trained_tokens")


def estimate_length(run: RunConfig, data: Data | None, rows_per_step: int) -> Length | None:
    """Steps of a run from its start; None if they depend on data whose size is unknown."""
    train = run.train
    row = run.data.row_length
    per_step = rows_per_step * (data.tokens_per_row if data else row * ASSUMED_PACKING_EFFICIENCY)
    certain: Certainty = data.certainty if data else "estimated"
    if train.eval_only:
        return Length(0, 0, "eval_only", "counted", 0, 0)
    ends: dict[str, tuple[int, Certainty]] = {}
    if train.max_steps is not None:
        ends["max_steps"] = train.max_steps, "counted"
    if train.max_tokens is not None:
        ends["max_tokens"] = max(1, math.ceil(train.max_tokens / per_step)), "estimated"
    if not ends:
        if data is None:
            return None
        # Exact: the rounding error of a float would be rounded up to another step.
        epochs = Fraction(str(train.num_train_epochs))
        ends["num_train_epochs"] = _steps(run, data, rows_per_step, epochs), certain
    first = min(ends, key=lambda name: ends[name][0])
    steps, sure = ends[first]
    spread = data.spread if data and sure == "estimated" else 1.0
    spans = max(1, math.floor(steps / spread)), math.ceil(steps * spread)
    return Length(steps, round(steps * per_step), first, sure, *spans)


def _steps(run: RunConfig, data: Data, rows_per_step: int, epochs: Fraction) -> int:
    """Steps of `epochs`; the last step of an epoch may be partial or dropped (`last_batch`)."""
    full_epochs = math.floor(epochs)

    def used(epoch: int) -> int:
        rows = data.epoch_rows[epoch % len(data.epoch_rows)]
        keeps = rows < rows_per_step or keeps_rest(rows, rows_per_step, run.data.last_batch)
        return rows if keeps else rows - rows % rows_per_step

    steps = sum(math.ceil(used(epoch) / rows_per_step) for epoch in range(full_epochs))
    return steps + math.ceil((epochs - full_epochs) * used(full_epochs) / rows_per_step)


def estimate_work(config: DecoderConfig, run: RunConfig, data: Data | None, rows: int) -> Work:
    """Compute work of `rows` rows: the mean tokens per row in documents of equal length, or full
    rows of one document each if the data is unknown."""
    row = run.data.row_length
    if data is None or not data.documents:
        return Work.from_lengths(config, [row] * rows)
    tokens = data.tokens_per_row * rows
    lengths = data.documents if run.data.isolate_samples else data.rows
    length = max(1, round(data.tokens / lengths))
    documents = max(1, round(tokens / length))
    document_work = Work.from_lengths(config, [length])
    trained = data.trained_tokens / max(1, data.tokens)
    return Work(
        tokens=length * documents,
        attention_pairs=document_work.attention_pairs * documents,
        local_pairs=document_work.local_pairs * documents,
        logits=round(length * documents * trained),
    )
