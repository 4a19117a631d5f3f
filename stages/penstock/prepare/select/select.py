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
from penstock.prepare.select.filter_state import Choice, Mask, Pool
from penstock.prepare.select.near_duplicates import SHINGLE, jaccard, near_duplicates
from penstock.prepare.select.ngrams import Hashes, mixed
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.slices import Finished


@dataclass(frozen=True)
class Part:
    """Which samples of a slice are stored in each split; None: all of them."""

    train: Mask | None
    validation: Mask | None


@dataclass(frozen=True)
class Selection:
    """What is stored of every finished slice, and what became of the rest."""

    parts: tuple[Part, ...]
    dropped: tuple[Counter[str], ...]
    """Of every slice: samples that are stored nowhere, by reason."""
    examples: tuple[dict[str, Any], ...]
    """Some of them: source, slice, row (the record's place in the slice), reason, why."""


def select(
    finished: Sequence[Finished], settings: PrepareSettings, *, workers: int = 1
) -> Selection:
    """Choose the samples that are stored. What it needs to know of them is kept beside the slices,
    and computed by `workers` threads where it is missing.

    Slices that are added change little for the samples of others: what repeats an earlier sample
    goes, and a share for validation grows. Raises StageError when training, or a source that is to
    be drawn from, is left without samples.
    """
    choice = Choice(finished)
    features = Features(workers)
    _use_the_first(choice, settings)
    _leave_out_contaminated(choice, settings, features)
    if settings.deduplicate:
        _leave_out_exact(choice, features)
    if settings.deduplicate == "near":
        _leave_out_near(choice, settings, features)
    held = _set_aside(choice, settings)
    parts = tuple(_part(choice, held, place) for place in range(len(finished)))
    count = len(settings.datasets)
    num_rows, labels, rows, tokens = [0] * count, [""] * count, [0] * count, [0] * count
    for place in choice.places("train"):
        item, _, tally = finished[place]
        num_rows[item.dataset] += count_kept(parts[place].train, tally.rows)
        labels[item.dataset] = item.label
        rows[item.dataset] += tally.rows
        tokens[item.dataset] += tally.tokens
    # Of all samples, also of those that are left out: near enough to judge how long an epoch is.
    mean_tokens = [max(1.0, t / max(1, n)) for t, n in zip(tokens, rows, strict=True)]
    check_mix(num_rows, labels, settings, mean_tokens)
    return Selection(parts, tuple(choice.dropped), tuple(choice.examples))


def count_kept(mask: Mask | None, rows: int) -> int:
    """How many of a slice's samples a mask keeps."""
    return rows if mask is None else int(mask.sum())


def validation_count(size: int | float | None, total: int) -> int:
    """Number of validation samples that `data.val_set_size` asks for, of `total` samples."""
    return max(1, round(size * total)) if isinstance(size, float) else size or 0


def held_out(ranks: Sequence[Hashes], size: int | float | None) -> list[Mask]:
    """Which samples are set aside, slice by slice: those of the lowest ranks.

    `size` is a number of samples (int) or a share below one (float; rounded, at least one). Slices
    that are added leave the choice among the others nearly as it is.
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
    return mixed(mixed(np.arange(1, rows + 1, dtype=np.uint64)) ^ np.uint64(start))


def _use_the_first(choice: Choice, settings: PrepareSettings) -> None:
    for role, mix in (("train", settings.mix), ("validation", settings.test_mix)):
        used: Counter[int] = Counter()
        for place in choice.places(role):
            item, _, tally = choice.finished[place]
            limit = mix_settings(mix, item.dataset).max_samples
            if limit is None:
                continue
            first = max(0, limit - used[item.dataset])
            used[item.dataset] += tally.rows
            for row in choice.drop(place, np.arange(first, tally.rows), "max_samples"):
                choice.tell(place, row, "max_samples", f"{limit} samples come before it")


def _leave_out_contaminated(choice: Choice, settings: PrepareSettings, features: Features) -> None:
    avoid, places = choice.entries(choice.places("avoid")), choice.places("train")
    if not avoid:
        return
    labels = {item.dataset: item.label for item, _, _ in avoid}
    length = settings.decontaminate_ngram
    flags = features.contaminated(choice.entries(places), avoid, length)
    for place, found in zip(places, flags, strict=True):
        rows = np.flatnonzero(choice.kept[place] & (found != CLEAN))
        for row in choice.drop(place, rows, "contaminated"):
            why = f"it shares {length} tokens in a row with {labels[int(found[row])]}"
            choice.tell(place, row, "contaminated", why)


def _leave_out_exact(choice: Choice, features: Features) -> None:
    pool, places, num_fixed = _pool_of(choice)
    first = exact_duplicates(pool.gathered(features.digests(choice.entries(places))))
    repeated = np.flatnonzero(first[num_fixed:] >= 0) + num_fixed
    for sample in pool.drop(repeated, "exact_duplicate"):
        why = f"it has the same tokens as {pool.name(int(first[sample]))}"
        pool.tell(sample, "exact_duplicate", why)


def _leave_out_near(choice: Choice, settings: PrepareSettings, features: Features) -> None:
    pool, places, num_fixed = _pool_of(choice)
    threshold = settings.near_duplicate_threshold
    bands = features.bands(choice.entries(places), threshold)
    agreeing = (pool.gathered([its[band] for its in bands]) for band in range(len(bands[0])))
    near = near_duplicates(agreeing, pool.shingles, threshold, num_fixed)
    for sample in pool.drop(np.array(sorted(near), dtype=np.int64), "near_duplicate"):
        other = near[sample]
        alike = jaccard(pool.shingles(sample), pool.shingles(other))
        why = f"of its runs of {SHINGLE} tokens and those of {pool.name(other)} {alike:.0%} are one"
        pool.tell(sample, "near_duplicate", why)


def _pool_of(choice: Choice) -> tuple[Pool, list[int], int]:
    """What is still in, validation sources first: (pool, slices, samples that are to stay)."""
    fixed = choice.places("validation")
    places = [*fixed, *choice.places("train")]
    pool = Pool(choice, places)
    return pool, places, pool.num_first(len(fixed))


def _set_aside(choice: Choice, settings: PrepareSettings) -> dict[int, Mask]:
    """For every training slice, which of its samples are validation."""
    places = choice.places("train")
    left = sum(int(choice.kept[place].sum()) for place in places)
    if not left:
        reasons = sum(choice.dropped, Counter[str]())
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        raise StageError(
            f"No sample is left to train on: {told or 'the sources hold none'}.\n"
            "  Check data.deduplicate, data.decontaminate_ngram and the weights."
        )
    ranks = [
        random_ranks(item.key, tally.rows, settings.seed)[choice.kept[place]]
        for place, (item, _, tally) in zip(places, choice.entries(places), strict=True)
    ]
    masks = held_out(ranks, settings.val_set_size)
    taken = sum(int(mask.sum()) for mask in masks)
    if taken >= left:
        raise StageError(
            f"Validation takes {taken} samples, and there are {left} in all.\n"
            f"  Set data.val_set_size ({settings.val_set_size}) lower."
        )
    found: dict[int, Mask] = {}
    for place, mask in zip(places, masks, strict=True):
        found[place] = np.zeros(len(choice.kept[place]), dtype=bool)
        found[place][np.flatnonzero(choice.kept[place])[mask]] = True
    return found


def _part(choice: Choice, held: dict[int, Mask], place: int) -> Part:
    kept = choice.kept[place]
    nothing = np.zeros(len(kept), dtype=bool)
    role = choice.finished[place][0].role
    if role == "train":
        return Part(_told(kept & ~held[place]), _told(kept & held[place]))
    return Part(_told(nothing), _told(kept if role == "validation" else nothing))


def _told(mask: Mask) -> Mask | None:
    return None if len(mask) and mask.all() else mask
