"""Which samples of a split share a row, and in which order the rows stand."""

from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import CapabilityError, StageError
from penstock.pack.settings import PackSettings
from penstock.rows.bins import Bins, Indices, alone, join, sequential
from penstock.rows.order import rows_generator
from penstock.rows.packing.multipack import multipack
from penstock.rows.prepared import PreparedSamples

Method = Literal["sequential", "multipack", "unpacked"]
METHODS: tuple[Method, ...] = ("sequential", "multipack", "unpacked")


@dataclass(frozen=True)
class Layout:
    """The rows of one split: those of its first epoch, then those of the next one, and so on."""

    bins: Bins
    """Over the samples of the split, which may be in several epochs."""
    epoch_rows: list[int]
    """How many rows each epoch has."""
    lengths: Indices
    """Of every sample."""

    def documents(self) -> Indices:
        """The lengths of all documents, row after row."""
        return self.lengths[self.bins.samples]


def method_of(split: str, settings: PackSettings) -> Method:
    """How the samples of a split are to be laid into rows."""
    if split == "validation" and not settings.eval_sample_packing:
        return "unpacked"
    return settings.sample_packing_method


def lay_out(samples: PreparedSamples, settings: PackSettings, method: Method) -> Layout:
    """Plan the rows of every epoch by itself.

    Raises StageError when a sample is longer than a row, and CapabilityError for samples that
    nothing trains on.
    """
    if samples.kind != "sft":
        raise CapabilityError(
            f"These are {samples.kind} samples, and nothing trains on them yet.\n"
            "  Write pipeline.stages: [prepare], or data of another type."
        )
    lengths = samples.lengths()
    _refuse_longer(samples, lengths, settings.sample_packing_sequence_len)
    epochs: list[Bins] = []
    for number, order in enumerate(samples.epochs()):
        bins = _bins(lengths[order], settings, method, number)
        epochs.append(Bins(order[bins.samples], bins.ends))
    return Layout(join(epochs), [len(bins) for bins in epochs], lengths)


def _bins(lengths: Indices, settings: PackSettings, method: Method, epoch: int) -> Bins:
    capacity = settings.sample_packing_sequence_len
    if method == "unpacked":
        return alone(len(lengths))
    if method == "sequential":
        return sequential(lengths, capacity)
    rng = rows_generator(settings.seed, epoch)
    return multipack(lengths, capacity, settings.sample_packing_group_size, rng)


def _refuse_longer(samples: PreparedSamples, lengths: Indices, capacity: int) -> None:
    too_long = lengths > capacity
    if not too_long.any():
        return
    section = "datasets" if samples.split == "train" else "test_datasets or data.datasets"
    of = sorted(set(samples.datasets()[too_long].tolist()))
    names = " and ".join(f"data.{section}.{number}.max_seq_len" for number in of)
    raise StageError(
        f"{too_long.sum()} of {len(lengths)} {samples.split} samples are longer than a row of "
        f"{capacity} tokens; the longest has {lengths.max()}.\n"
        f"  Set {names} to {capacity} to cut them, or data.sample_packing_sequence_len to "
        f"{lengths.max()} or more."
    )
