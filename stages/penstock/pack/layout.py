"""Which samples of a split share a row, and in which order the rows stand."""

import numpy as np

from penstock.core.errors import StageError
from penstock.pack.settings import PackSettings
from penstock.pack.shards import Packing
from penstock.rows.bins import Bins, alone, multipack, sequential
from penstock.rows.order import row_order
from penstock.rows.prepared import PreparedSamples


def lay_out(samples: PreparedSamples, settings: PackSettings) -> Packing:
    """Plan the rows. Raises StageError when a sample is longer than a row."""
    lengths = samples.lengths()
    _refuse_longer(samples, settings.sample_packing_sequence_len)
    order = samples.order()
    bins = _bins(samples.split, lengths[order], settings)
    return Packing(samples, Bins(order[bins.samples], bins.ends), lengths)


def _bins(split: str, lengths: np.ndarray, settings: PackSettings) -> Bins:
    capacity = settings.sample_packing_sequence_len
    if split == "validation" and not settings.eval_sample_packing:
        return alone(len(lengths))
    if settings.sample_packing_method == "sequential":
        return sequential(lengths, capacity)
    bins = multipack(lengths, capacity, settings.sample_packing_group_size)
    return bins.reordered(row_order(len(bins), settings.seed))


def _refuse_longer(samples: PreparedSamples, capacity: int) -> None:
    lengths = samples.lengths()
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
