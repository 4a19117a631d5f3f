"""What a user's data is: its type and columns, and how many samples of which length it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.loading.load import loads
from penstock.config.schema.run import RunConfig
from penstock.core.errors import StageError
from penstock.core.sources.pin import pin_tokenizer
from penstock.core.sources.pin_remote import resolve_folder
from penstock.estimate.costs.file_sizes import bytes_per_token
from penstock.models.builtin import SCHEME
from penstock.pipeline.pins import pin_dataset
from penstock.pipeline.plan import dataset_settings
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.dataset_type import INFER_RECORDS, InferredType
from penstock.prepare.infer_type import guess_format
from penstock.rows.row_length import SampleSizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from penstock.prepare.first_records import FirstSamples

MOST_COUNTED = 1_000_000
"""Records that are counted at most."""

MOST_MEASURED = 1_000
"""Records whose tokens are counted at most."""

HUB_VOCABULARY = 150_000
"""Assumed vocabulary size of a model that is not on this machine."""

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "preference": {"train": {"objective": "preference"}},
    "preference_turns": {"train": {"objective": "preference"}},
    "kto": {"train": {"objective": "preference"}, "preference": {"loss_type": "kto"}},
}
"""Settings that a type needs beside its own."""


@dataclass(frozen=True)
class OwnData:
    """The data of one path."""

    path: str
    format: InferredType
    is_certain: bool
    """Whether its columns leave no other choice."""
    samples: int
    """Estimated from the first records, if there are more."""
    measured: int
    """The first samples, whose tokens were counted."""
    tokens: float
    """Mean tokens of a sample."""
    longest: int
    """Tokens of the longest of the `measured` samples."""
    is_tokenized: bool
    """Whether the model's tokenizer counted them; otherwise estimated from their characters."""
    dropped_records: str = ""
    """How many of the first records give no sample of this model: "3 of 10 records"."""
    faults: tuple[str, ...] = ()
    """Why they give none."""
    template: str | None = None
    """The included chat template that renders them instead of the model's own."""

    @property
    def is_preference(self) -> bool:
        """Whether its samples are judged answers."""
        return self.format.type in OBJECTIVES

    @property
    def is_measured(self) -> bool:
        """Whether the longest sample is known."""
        return self.is_tokenized and self.measured == self.samples

    @property
    def sizes(self) -> SampleSizes:
        """As the pack stage sees them; the longest as an upper bound."""
        sides_per_sample = 2 if self.is_preference else 1
        longest = 1 << (max(1, sides_per_sample * self.longest) - 1).bit_length()
        return SampleSizes(longest, round(self.samples * self.tokens), self.samples)


def is_local_model(model: str) -> bool:
    """Whether the model can be read without a network."""
    return model.startswith(SCHEME) or Path(model).expanduser().is_dir()


def model_settings(model: str) -> dict[str, str]:
    """The section `model` of a config."""
    return {"config_path" if model.startswith(SCHEME) else "model_path": model}


def inspect_data(path: str, model: str) -> OwnData:
    """Read the records of `path`, as samples of `model`.

    Raises ConfigError or StageError if no record can be read or no type fits.
    """
    sections: dict[str, Any] = {
        "model": model_settings(model),
        "data": {"datasets": [{"path": path}]},
        "train": {"output_dir": "outputs/run"},
    }
    run = loads(sections)
    count, records = _read(run)
    guess, is_certain = guess_format(records[:INFER_RECORDS])
    for name, values in OBJECTIVES.get(guess.type, {}).items():
        sections[name] = {**sections.get(name, {}), **values}
    sections["data"] = {"datasets": [{"path": path, **guess.settings()}]}
    dropped_records, faults = "", tuple[str, ...]()
    if is_local_model(model):
        tokenizer = _load_tokenizer(run)
        measured = _tokenize(loads(sections), records, tokenizer)
        faults, template = measured.faults, measured.template
        dropped_records = f"{measured.dropped:,} of {len(records):,} records"
        if template:
            data = {**sections["data"], "chat_template": template}
            measured = _tokenize(loads({**sections, "data": data}), records, tokenizer)
        if measured.samples:
            mean = measured.tokens / measured.samples
            samples = round(count * measured.samples / len(records))
            sizes = samples, measured.samples, mean, max(measured.lengths), True
            return OwnData(path, guess, is_certain, *sizes, dropped_records, faults, template)
    per_token = bytes_per_token(HUB_VOCABULARY)
    lengths = [sum(len(text.encode()) for text in _texts(record)) / per_token for record in records]
    sizes = count, len(records), sum(lengths) / len(lengths), round(max(lengths)), False
    return OwnData(path, guess, is_certain, *sizes, dropped_records, faults)


def _read(run: RunConfig) -> tuple[int, list[dict[str, Any]]]:
    """The number of records, and the first ones that can be read."""
    from penstock.prepare.readers.file_splits import split_source
    from penstock.prepare.readers.registry import read_chunks

    [dataset] = run.data.datasets
    source = pin_dataset(dataset, None)
    count, records = 0, list[dict[str, Any]]()
    why = ""
    splits = split_source(source, ds_type=None, streaming=False, token=None)
    for chunk in chain.from_iterable(read_chunks(split, None) for split in splits):
        for value in chunk.part(0, MOST_MEASURED - len(records)).values():
            if isinstance(value, BadRecord):
                why = value.why
            else:
                records.append(value)
        count += len(chunk)
        if count >= MOST_COUNTED:
            break
    if not records:
        raise StageError(f"{dataset.path} has no record that can be read{why and f': {why}'}.")
    return count, records


def _load_tokenizer(run: RunConfig) -> "PreTrainedTokenizerBase":
    from penstock.rows.tokenizer import load_tokenizer

    source = run.model.tokenizer_source
    pinned = pin_tokenizer(source)
    return load_tokenizer(resolve_folder(source, pinned), pinned.pin.get("commit"))


def _tokenize(
    run: RunConfig, records: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase"
) -> "FirstSamples":
    """The samples of the records."""
    from penstock.prepare.first_records import first_samples, image_source

    [dataset] = run.data.datasets
    settings = dataset_settings(run, dataset, "train")
    images = image_source(run, pin_dataset(dataset, None), settings)
    return first_samples(records, settings, tokenizer, images=images)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value
    return [text for child in inner for text in _texts(child)] if hasattr(inner, "__iter__") else []
