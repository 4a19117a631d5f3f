"""Select the samples of each split.

In this order: `max_samples` of each source, decontamination, exact and near deduplication, and the
validation split of the remaining samples. Only `max_samples` applies to validation sources;
training samples that are duplicates of validation samples are dropped.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import StageError
from penstock.prepare.mix import check_mix, mix_settings
from penstock.prepare.select.decontaminate import CLEAN
from penstock.prepare.select.exact_duplicates import exact_duplicates
from penstock.prepare.select.features import Features
from penstock.prepare.select.filter_state import FilterState, Mask, SamplePool
from penstock.prepare.select.near_duplicates import SHINGLE, jaccard, near_duplicates
from penstock.prepare.select.ngrams import Hashes, hash_text, splitmix64
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.slices import TokenizedSlice


@dataclass(frozen=True)
class SplitMasks:
    """Samples of a slice that are stored in each split; None: all of them."""

    train: Mask | None
    validation: Mask | None


@dataclass(frozen=True)
class Selection:
    """Selected samples of every slice, and counts and examples of dropped ones."""

    masks: tuple[SplitMasks, ...]
    dropped: tuple[Counter[str], ...]
    """Dropped samples of every slice, by reason."""
    examples: tuple[dict[str, Any], ...]
    """Examples: source, slice, row (index of the record in the slice), reason, why."""
    validation_in_train: int = 0
    """Validation samples whose tokens are also those of a training sample."""


def select(
    finished: Sequence[TokenizedSlice],
    settings: PrepareSettings,
    *,
    workers: int = 1,
    token: bool | None = None,
) -> Selection:
    """Select the samples of each split. Features that are not cached beside the slices are computed
    by `workers` threads; `token` says whether the Hugging Face login is used to read the records of
    `split_by` (None: if there is one).

    Adding slices changes little for other samples: duplicates of earlier samples are dropped, and a
    validation share grows. Raises StageError if no training sample is left, or a source with a
    weight has no samples.
    """
    state = FilterState(finished)
    features = Features(workers, token)
    _apply_max_samples(state, settings)
    # Before duplicates: a clean one could be dropped for a near duplicate that goes in turn.
    _drop_contaminated(state, settings, features)
    # Exact ones first: it takes digests alone, and leaves fewer samples to compare by shingles.
    if settings.deduplicate:
        _drop_exact_duplicates(state, features)
    if settings.deduplicate == "near":
        _drop_near_duplicates(state, settings, features)
    held = _split_validation(state, settings, features)
    parts = tuple(_split_masks(state, held, index) for index in range(len(finished)))
    count = len(settings.datasets)
    num_rows, labels, rows, tokens = [0] * count, [""] * count, [0] * count, [0] * count
    for slice_index in state.slice_indices("train"):
        item, _, tally = finished[slice_index]
        num_rows[item.dataset] += count_kept(parts[slice_index].train, tally.rows)
        labels[item.dataset] = item.label
        rows[item.dataset] += tally.rows
        tokens[item.dataset] += tally.tokens
    # Of all samples, also of those that are left out: near enough to judge how long an epoch is.
    mean_tokens = [max(1.0, t / max(1, n)) for t, n in zip(tokens, rows, strict=True)]
    check_mix(num_rows, labels, settings, mean_tokens)
    # Deduplication has dropped them: samples of validation sources come first in its pool.
    repeated = 0 if settings.deduplicate else _count_validation_in_train(finished, parts, features)
    return Selection(parts, tuple(state.dropped), tuple(state.examples), repeated)


def _count_validation_in_train(
    finished: Sequence[TokenizedSlice], parts: Sequence[SplitMasks], features: Features
) -> int:
    pairs = list(zip(finished, parts, strict=True))
    if not any(count_kept(part.validation, entry[2].rows) for entry, part in pairs):
        return 0
    used = [(entry, part) for entry, part in pairs if entry[0].role != "avoid"]
    # The first 64 bits of each digest.
    digests = [digest[0] for digest in features.digests([entry for entry, _ in used])]
    nothing = np.empty(0, dtype=np.uint64)
    train, validation = [nothing], [nothing]
    for digest, (_, part) in zip(digests, used, strict=True):
        train.append(digest if part.train is None else digest[part.train])
        validation.append(digest if part.validation is None else digest[part.validation])
    return int(np.isin(np.concatenate(validation), np.concatenate(train)).sum())


def count_kept(mask: Mask | None, rows: int) -> int:
    """Number of samples that a mask of a slice selects."""
    return rows if mask is None else int(mask.sum())


def validation_count(size: int | float | None, total: int) -> int:
    """Number of validation samples that `data.val_set_size` asks for, of `total` samples."""
    return max(1, round(size * total)) if isinstance(size, float) else size or 0


def validation_masks(
    ranks: Sequence[Hashes], size: int | float | None, *, whole_groups: bool = False
) -> list[Mask]:
    """Masks of validation samples, slice by slice: the samples with the lowest random ranks.

    `size` is a number of samples (int) or a share below one (float; rounded, at least one). Adding
    slices changes the selection from the other slices only slightly. With `whole_groups`, samples
    with the same rank are a group that is held out whole or not, until `size` samples are.
    """
    every = np.concatenate([np.empty(0, dtype=np.uint64), *ranks])
    is_held = np.zeros(len(every), dtype=bool)
    num_validation = min(validation_count(size, len(every)), len(every))
    if num_validation:
        last = np.partition(every, num_validation - 1)[num_validation - 1]
        is_held = every <= last if whole_groups else every < last
        is_held[np.flatnonzero(every == last)[: num_validation - int(is_held.sum())]] = True
    return np.split(is_held, np.cumsum([len(of_slice) for of_slice in ranks])[:-1])


def random_ranks(key: str, rows: int, seed: int) -> Hashes:
    """Random numbers for the samples of a slice; each depends only on the seed, the slice's key and
    the sample's index."""
    start = np.uint64(hash_text(f"{seed} {key}"))
    return splitmix64(splitmix64(np.arange(1, rows + 1, dtype=np.uint64)) ^ start)


def _apply_max_samples(state: FilterState, settings: PrepareSettings) -> None:
    for role, mix in (("train", settings.mix), ("validation", settings.test_mix)):
        used: Counter[int] = Counter()
        for slice_index in state.slice_indices(role):
            item, _, tally = state.finished[slice_index]
            limit = mix_settings(mix, item.dataset).max_samples
            if limit is None:
                continue
            first = max(0, limit - used[item.dataset])
            used[item.dataset] += tally.rows
            for row in state.drop(slice_index, np.arange(first, tally.rows), "max_samples"):
                why = f"{limit} samples come before it"
                state.add_example(slice_index, row, "max_samples", why)


def _drop_contaminated(state: FilterState, settings: PrepareSettings, features: Features) -> None:
    avoid = [state.finished[index] for index in state.slice_indices("avoid")]
    slice_indices = state.slice_indices("train")
    if not avoid:
        return
    labels = {item.dataset: item.label for item, _, _ in avoid}
    length = settings.decontaminate_ngram
    entries = [state.finished[index] for index in slice_indices]
    flags = features.contaminated(entries, avoid, length)
    for slice_index, flag in zip(slice_indices, flags, strict=True):
        rows = np.flatnonzero(state.keep_masks[slice_index] & (flag != CLEAN))
        for row in state.drop(slice_index, rows, "contaminated"):
            why = f"it shares {length} tokens in a row with {labels[int(flag[row])]}"
            state.add_example(slice_index, row, "contaminated", why)


def _drop_exact_duplicates(state: FilterState, features: Features) -> None:
    pool, entries, num_fixed = _build_pool(state)
    first = exact_duplicates(pool.gather(features.digests(entries)))
    repeated = np.flatnonzero(first[num_fixed:] >= 0) + num_fixed
    for sample in pool.drop(repeated, "exact_duplicate"):
        why = f"it has the same tokens as {pool.describe(int(first[sample]))}"
        pool.add_example(sample, "exact_duplicate", why)


def _drop_near_duplicates(
    state: FilterState, settings: PrepareSettings, features: Features
) -> None:
    pool, entries, num_fixed = _build_pool(state)
    threshold = settings.near_duplicate_threshold
    bands = features.bands(entries, threshold)
    agreeing = (
        pool.gather([signatures[band] for signatures in bands]) for band in range(len(bands[0]))
    )
    near = near_duplicates(agreeing, pool.shingles, threshold, num_fixed)
    for sample in pool.drop(np.array(sorted(near), dtype=np.int64), "near_duplicate"):
        duplicate_of = near[sample]
        alike = jaccard(pool.shingles(sample), pool.shingles(duplicate_of))
        name = pool.describe(duplicate_of)
        why = f"of its runs of {SHINGLE} tokens and those of {name} {alike:.0%} are one"
        pool.add_example(sample, "near_duplicate", why)


def _build_pool(state: FilterState) -> tuple[SamplePool, list[TokenizedSlice], int]:
    """(pool of the kept samples, validation sources first; its slices; number of samples that are
    never dropped)."""
    fixed = state.slice_indices("validation")
    slice_indices = [*fixed, *state.slice_indices("train")]
    pool = SamplePool(state, slice_indices)
    entries = [state.finished[index] for index in slice_indices]
    return pool, entries, pool.num_samples_in(len(fixed))


def _split_validation(
    state: FilterState, settings: PrepareSettings, features: Features
) -> dict[int, Mask]:
    slice_indices = state.slice_indices("train")
    num_samples = sum(int(state.keep_masks[slice_index].sum()) for slice_index in slice_indices)
    if not num_samples:
        reasons = sum(state.dropped, Counter[str]())
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise StageError(
            f"No sample is left to train on: {counts or 'the sources have none'}.\n"
            "  Check data.deduplicate, data.decontaminate_ngram and the weights."
        )
    entries = [state.finished[index] for index in slice_indices]
    if settings.split_by and settings.val_set_size:
        start = np.uint64(hash_text(str(settings.seed)))
        groups = features.groups(entries, settings.split_by)
        ranks = [splitmix64(np.asarray(of_slice) ^ start) for of_slice in groups]
    else:
        ranks = [random_ranks(item.key, tally.rows, settings.seed) for item, _, tally in entries]
    pairs = zip(slice_indices, ranks, strict=True)
    masks = validation_masks(
        [of_slice[state.keep_masks[index]] for index, of_slice in pairs],
        settings.val_set_size,
        whole_groups=settings.split_by is not None,
    )
    num_held_out = sum(int(mask.sum()) for mask in masks)
    if num_held_out >= num_samples:
        groups_hint = (
            f", or data.split_by to a column with smaller groups than {settings.split_by}"
            if settings.split_by
            else ""
        )
        raise StageError(
            f"Validation takes {num_held_out} samples, and there are only {num_samples}.\n"
            f"  Set data.val_set_size ({settings.val_set_size}) lower{groups_hint}."
        )
    masks_by_slice: dict[int, Mask] = {}
    for index, mask in zip(slice_indices, masks, strict=True):
        masks_by_slice[index] = np.zeros(len(state.keep_masks[index]), dtype=bool)
        masks_by_slice[index][np.flatnonzero(state.keep_masks[index])[mask]] = True
    return masks_by_slice


def _split_masks(state: FilterState, held: dict[int, Mask], slice_index: int) -> SplitMasks:
    train = validation = np.zeros(len(state.keep_masks[slice_index]), dtype=bool)
    role = state.finished[slice_index][0].role
    if role == "validation":
        validation = state.keep_masks[slice_index]
    elif role == "train":
        is_held = held[slice_index]
        train = state.keep_masks[slice_index] & ~is_held
        validation = state.keep_masks[slice_index] & is_held
    masks = (None if len(mask) and mask.all() else mask for mask in (train, validation))
    return SplitMasks(*masks)
