"""Which samples are stored, and in which split.

In this order: the first `max_samples` of a source; none that shares a run of tokens with data to be
avoided; none that repeats an earlier one; and of what is left, some are set aside for validation.
Samples of validation sources are subject to `max_samples` alone, and a training sample that repeats
one of them is left out of training.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from penstock.core.errors import StageError
from penstock.prepare.mix import check_mix, mix_settings
from penstock.prepare.select.decontaminate import CLEAN
from penstock.prepare.select.exact_duplicates import exact_duplicates
from penstock.prepare.select.features import Features
from penstock.prepare.select.filter_state import FilterState, Mask, SamplePool
from penstock.prepare.select.near_duplicates import SHINGLE, jaccard, near_duplicates
from penstock.prepare.select.ngrams import Hashes, splitmix64
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.slices import TokenizedSlice


@dataclass(frozen=True)
class SplitMasks:
    """Which samples of a slice are stored in each split; None: all of them."""

    train: Mask | None
    validation: Mask | None


@dataclass(frozen=True)
class Selection:
    """What is stored of every finished slice, and what became of the rest."""

    masks: tuple[SplitMasks, ...]
    dropped: tuple[Counter[str], ...]
    """Of every slice: samples that are stored nowhere, by reason."""
    examples: tuple[dict[str, Any], ...]
    """Some of them: source, slice, row (the record's place in the slice), reason, why."""


def select(
    finished: Sequence[TokenizedSlice], settings: PrepareSettings, *, workers: int = 1
) -> Selection:
    """Choose the samples that are stored. What it needs to know of them is kept beside the slices,
    and computed by `workers` threads where it is missing.

    Slices that are added change little for the samples of others: what repeats an earlier sample
    goes, and a share for validation grows. Raises StageError when training, or a source that is to
    be drawn from, is left without samples.
    """
    state = FilterState(finished)
    features = Features(workers)
    _apply_max_samples(state, settings)
    _drop_contaminated(state, settings, features)
    if settings.deduplicate:
        _drop_exact_duplicates(state, features)
    if settings.deduplicate == "near":
        _drop_near_duplicates(state, settings, features)
    held = _split_validation(state, settings)
    parts = tuple(_split_masks(state, held, place) for place in range(len(finished)))
    count = len(settings.datasets)
    num_rows, labels, rows, tokens = [0] * count, [""] * count, [0] * count, [0] * count
    for place in state.slice_indices("train"):
        item, _, tally = finished[place]
        num_rows[item.dataset] += count_kept(parts[place].train, tally.rows)
        labels[item.dataset] = item.label
        rows[item.dataset] += tally.rows
        tokens[item.dataset] += tally.tokens
    # Of all samples, also of those that are left out: near enough to judge how long an epoch is.
    mean_tokens = [max(1.0, t / max(1, n)) for t, n in zip(tokens, rows, strict=True)]
    check_mix(num_rows, labels, settings, mean_tokens)
    return Selection(parts, tuple(state.dropped), tuple(state.examples))


def count_kept(mask: Mask | None, rows: int) -> int:
    """How many of a slice's samples a mask keeps."""
    return rows if mask is None else int(mask.sum())


def validation_count(size: int | float | None, total: int) -> int:
    """Number of validation samples that `data.val_set_size` asks for, of `total` samples."""
    return max(1, round(size * total)) if isinstance(size, float) else size or 0


def validation_masks(ranks: Sequence[Hashes], size: int | float | None) -> list[Mask]:
    """Which samples are set aside, slice by slice: those of the lowest ranks.

    `size` is a number of samples (int) or a share below one (float; rounded, at least one). Slices
    that are added leave the state among the others nearly as it is.
    """
    every = np.concatenate([np.empty(0, dtype=np.uint64), *ranks])
    is_held = np.zeros(len(every), dtype=bool)
    wanted = min(validation_count(size, len(every)), len(every))
    if wanted:
        last = np.partition(every, wanted - 1)[wanted - 1]
        is_held = every < last
        is_held[np.flatnonzero(every == last)[: wanted - int(is_held.sum())]] = True
    return np.split(is_held, np.cumsum([len(of_slice) for of_slice in ranks])[:-1])


def random_ranks(key: str, rows: int, seed: int) -> Hashes:
    """A random number for every sample of a slice, which the seed, the slice's key and the sample's
    place in it decide alone."""
    start = int.from_bytes(blake2b(f"{seed} {key}".encode(), digest_size=8).digest(), "little")
    return splitmix64(splitmix64(np.arange(1, rows + 1, dtype=np.uint64)) ^ np.uint64(start))


def _apply_max_samples(state: FilterState, settings: PrepareSettings) -> None:
    for role, mix in (("train", settings.mix), ("validation", settings.test_mix)):
        used: Counter[int] = Counter()
        for place in state.slice_indices(role):
            item, _, tally = state.finished[place]
            limit = mix_settings(mix, item.dataset).max_samples
            if limit is None:
                continue
            first = max(0, limit - used[item.dataset])
            used[item.dataset] += tally.rows
            for row in state.drop(place, np.arange(first, tally.rows), "max_samples"):
                state.add_example(place, row, "max_samples", f"{limit} samples come before it")


def _drop_contaminated(state: FilterState, settings: PrepareSettings, features: Features) -> None:
    avoid, places = state.slices_at(state.slice_indices("avoid")), state.slice_indices("train")
    if not avoid:
        return
    labels = {item.dataset: item.label for item, _, _ in avoid}
    length = settings.decontaminate_ngram
    flags = features.contaminated(state.slices_at(places), avoid, length)
    for place, found in zip(places, flags, strict=True):
        rows = np.flatnonzero(state.keep_masks[place] & (found != CLEAN))
        for row in state.drop(place, rows, "contaminated"):
            why = f"it shares {length} tokens in a row with {labels[int(found[row])]}"
            state.add_example(place, row, "contaminated", why)


def _drop_exact_duplicates(state: FilterState, features: Features) -> None:
    pool, places, num_fixed = _build_pool(state)
    first = exact_duplicates(pool.gather(features.digests(state.slices_at(places))))
    repeated = np.flatnonzero(first[num_fixed:] >= 0) + num_fixed
    for sample in pool.drop(repeated, "exact_duplicate"):
        why = f"it has the same tokens as {pool.describe(int(first[sample]))}"
        pool.add_example(sample, "exact_duplicate", why)


def _drop_near_duplicates(
    state: FilterState, settings: PrepareSettings, features: Features
) -> None:
    pool, places, num_fixed = _build_pool(state)
    threshold = settings.near_duplicate_threshold
    bands = features.bands(state.slices_at(places), threshold)
    agreeing = (pool.gather([its[band] for its in bands]) for band in range(len(bands[0])))
    near = near_duplicates(agreeing, pool.shingles, threshold, num_fixed)
    for sample in pool.drop(np.array(sorted(near), dtype=np.int64), "near_duplicate"):
        other = near[sample]
        alike = jaccard(pool.shingles(sample), pool.shingles(other))
        why = f"of its runs of {SHINGLE} tokens and those of {pool.describe(other)} {alike:.0%} are one"
        pool.add_example(sample, "near_duplicate", why)


def _build_pool(state: FilterState) -> tuple[SamplePool, list[int], int]:
    """What is still in, validation sources first: (pool, slices, samples that are to stay)."""
    fixed = state.slice_indices("validation")
    places = [*fixed, *state.slice_indices("train")]
    pool = SamplePool(state, places)
    return pool, places, pool.num_samples_in(len(fixed))


def _split_validation(state: FilterState, settings: PrepareSettings) -> dict[int, Mask]:
    """For every training slice, which of its samples are validation."""
    places = state.slice_indices("train")
    left = sum(int(state.keep_masks[place].sum()) for place in places)
    if not left:
        reasons = sum(state.dropped, Counter[str]())
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise StageError(
            f"No sample is left to train on: {told or 'the sources hold none'}.\n"
            "  Check data.deduplicate, data.decontaminate_ngram and the weights."
        )
    ranks = [
        random_ranks(item.key, tally.rows, settings.seed)[state.keep_masks[place]]
        for place, (item, _, tally) in zip(places, state.slices_at(places), strict=True)
    ]
    masks = validation_masks(ranks, settings.val_set_size)
    taken = sum(int(mask.sum()) for mask in masks)
    if taken >= left:
        raise StageError(
            f"Validation takes {taken} samples, and there are {left} in all.\n"
            f"  Set data.val_set_size ({settings.val_set_size}) lower."
        )
    found: dict[int, Mask] = {}
    for place, mask in zip(places, masks, strict=True):
        found[place] = np.zeros(len(state.keep_masks[place]), dtype=bool)
        found[place][np.flatnonzero(state.keep_masks[place])[mask]] = True
    return found


def _split_masks(state: FilterState, held: dict[int, Mask], place: int) -> SplitMasks:
    kept = state.keep_masks[place]
    nothing = np.zeros(len(kept), dtype=bool)
    role = state.finished[place][0].role
    if role == "train":
        return SplitMasks(_none_if_all(kept & ~held[place]), _none_if_all(kept & held[place]))
    return SplitMasks(
        _none_if_all(nothing), _none_if_all(kept if role == "validation" else nothing)
    )


def _none_if_all(mask: Mask) -> Mask | None:
    return None if len(mask) and mask.all() else mask
