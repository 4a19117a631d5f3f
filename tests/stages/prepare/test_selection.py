"""Which samples are stored: judged against plain Python over lists of tokens."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import StageError
from penstock.prepare.select.near_duplicates import SHINGLE
from penstock.prepare.select.select import random_ranks, select, validation_masks
from penstock.prepare.settings import MixSettings
from penstock.prepare.slices import TokenizedSlice
from tests.stages.finished import finished, settings


def stored(entries, selection, split="train"):
    """The places of what is stored, slice by slice."""
    found = []
    for (_, _, tally), part in zip(entries, selection.masks, strict=True):
        mask = getattr(part, split)
        found.append(list(range(tally.rows)) if mask is None else np.flatnonzero(mask).tolist())
    return found


def tokens(rng, count, of=50):
    return [rng.randrange(of) for _ in range(count)]


def changed(rng, sample, share):
    return [rng.randrange(1000, 1050) if rng.random() < share else token for token in sample]


def test_of_equal_samples_the_first_one_stays(tmp_path):
    rng = random.Random(0)
    pool = [tokens(rng, rng.randrange(1, 9), of=3) for _ in range(60)]
    parts = [[rng.choice(pool) for _ in range(40)] for _ in range(3)]
    entries = [finished(tmp_path, part, dataset=n % 2, name=str(n)) for n, part in enumerate(parts)]
    selection = select(entries, settings(2, deduplicate="exact"))
    seen: set[tuple[int, ...]] = set()
    expected = []
    for part in parts:
        first = [n for n, s in enumerate(part) if tuple(s) not in seen | set(map(tuple, part[:n]))]
        expected.append(first)
        seen.update(map(tuple, part))
    assert stored(entries, selection) == expected
    gone = sum(map(len, parts)) - sum(map(len, expected))
    assert sum(d["exact_duplicate"] for d in selection.dropped) == gone > 0
    assert [e["reason"] for e in selection.examples] == ["exact_duplicate"] * 3


def runs(sample, length):
    if len(sample) < length:
        return {tuple(sample)}
    return {tuple(sample[n : n + length]) for n in range(len(sample) - length + 1)}


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_near_duplicates_are_those_that_comparing_all_with_all_finds(threshold, tmp_path):
    rng = random.Random(1)
    originals = [tokens(rng, rng.randrange(2, 90)) for _ in range(60)]
    samples = [
        changed(rng, rng.choice(originals), rng.choice([0, 0.01, 0.03, 0.1])) for _ in range(300)
    ]
    entries = [finished(tmp_path, samples[:200]), finished(tmp_path, samples[200:], name="2")]
    more = {"deduplicate": "near", "near_duplicate_threshold": threshold}
    selection = select(entries, settings(**more))
    kept: list[int] = []
    for number, sample in enumerate(samples):
        mine = runs(sample, SHINGLE)
        others = (runs(samples[other], SHINGLE) for other in kept)
        if all(len(mine & its) / len(mine | its) < threshold for its in others):
            kept.append(number)
    first, second = stored(entries, selection)
    assert first + [200 + n for n in second] == kept
    assert 60 <= len(kept) < 300
    assert stored(entries, select(entries, settings(**more), workers=3)) == [first, second]


def test_samples_with_a_run_of_avoided_tokens_are_left_out_and_not_for_a_common_beginning(
    tmp_path,
):
    rng = random.Random(2)
    header = tokens(rng, 20)
    avoided = [header + tokens(rng, rng.randrange(3, 40)) for _ in range(30)]
    samples = []
    for _ in range(200):
        sample = header + tokens(rng, rng.randrange(1, 30))
        if rng.random() < 0.5:
            source, size = rng.choice(avoided)[20:], rng.randrange(1, 16)
            sample += source[:size] + tokens(rng, 3)
        samples.append(sample)
    entries = [
        finished(tmp_path, samples),
        finished(tmp_path, avoided[:9], "avoid"),
        finished(tmp_path, avoided[9:], "avoid", 1),
    ]
    selection = select(entries, settings(decontaminate_ngram=8))
    bad = set().union(*(runs(sample[20:], 8) for sample in avoided if len(sample) >= 28))
    expected = [n for n, sample in enumerate(samples) if not runs(sample, 8) & bad]
    assert stored(entries, selection) == [expected, [], []]
    assert 100 < len(expected) < 180
    assert selection.dropped[0] == {"contaminated": 200 - len(expected)}
    whys = {example["why"].removesuffix("0").removesuffix("1") for example in selection.examples}
    assert whys == {"it shares 8 tokens in a row with source-"}


def test_avoided_samples_shorter_than_a_run_leave_nothing_out(tmp_path):
    entries = [finished(tmp_path, [[1, 2, 3]]), finished(tmp_path, [[1, 2, 3]], "avoid")]
    assert stored(entries, select(entries, settings(decontaminate_ngram=4))) == [[0], []]
    with pytest.raises(StageError, match="No sample is left to train on: 1 contaminated"):
        select(entries, settings(decontaminate_ngram=3))


def test_of_a_source_only_the_first_so_many_samples_are_used(tmp_path):
    rng = random.Random(3)
    part = [tokens(rng, 5) for _ in range(10)]
    entries = [
        finished(tmp_path, part),
        finished(tmp_path, part, name="2"),
        finished(tmp_path, part, dataset=1),
        finished(tmp_path, part, "validation"),
    ]
    mix = (MixSettings(max_samples=12), MixSettings())
    selection = select(entries, settings(2, mix=mix, test_mix=(MixSettings(max_samples=3),)))
    every = list(range(10))
    assert stored(entries, selection) == [every, [0, 1], every, []]
    assert stored(entries, selection, "validation") == [[], [], [], [0, 1, 2]]
    assert [d["max_samples"] for d in selection.dropped] == [0, 8, 0, 7]


@pytest.mark.parametrize("deduplicate", ["exact", "near"])
def test_no_validation_sample_is_trained_on_in_another_copy(deduplicate, tmp_path):
    rng = random.Random(4)
    pool = [tokens(rng, 30) for _ in range(50)]
    parts = [[rng.choice(pool) for _ in range(60)] for _ in range(2)]
    train = [finished(tmp_path, part, name=str(n)) for n, part in enumerate(parts)]
    cases: list[tuple[dict[str, Any], list[TokenizedSlice]]] = [
        ({"val_set_size": 0.3}, []),
        ({}, [finished(tmp_path, [*parts[0][:9], parts[0][0]], "validation")]),
    ]
    for more, test in cases:
        selection = select([*train, *test], settings(deduplicate=deduplicate, **more))
        splits = [stored([*train, *test], selection, name) for name in ("train", "validation")]
        samples = [*parts, [*parts[0][:9], parts[0][0]]]
        found = [
            [tuple(samples[n][row]) for n, rows in enumerate(split) for row in rows]
            for split in splits
        ]
        assert not set(found[0]) & set(found[1])
        assert set(found[0]) | set(found[1]) == {tuple(s) for part in parts for s in part}
        if test:
            assert len(found[1]) == 10  # a validation source is stored as it is


def test_a_training_sample_that_is_nearly_a_validation_sample_is_left_out_wherever_it_stands(
    tmp_path,
):
    rng = random.Random(7)
    held = [tokens(rng, 60) for _ in range(3)]
    # Two of the held samples are nearly the same: what is held is stored as it is.
    held.append([*held[0][:-1], 1000])
    others = [tokens(rng, 60) for _ in range(4)]
    test = finished(tmp_path, held, "validation")
    for place, sample in enumerate([*held, held[1]]):
        near = [1001, *sample[1:]]
        mine, its = runs(near, SHINGLE), runs(sample, SHINGLE)
        assert 0.9 < len(mine & its) / len(mine | its) < 1
        entries = [finished(tmp_path, [*others[:place], near, *others[place:]]), test]
        selection = select(entries, settings(deduplicate="near"))
        assert stored(entries, selection) == [[n for n in range(5) if n != place], []]
        assert stored(entries, selection, "validation") == [[], [0, 1, 2, 3]]
        assert [dropped["near_duplicate"] for dropped in selection.dropped] == [1, 0]


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 80), st.floats(0.001, 0.99)),
)
def test_as_many_samples_are_set_aside_as_are_asked_for(sizes, size):
    masks = validation_masks([random_ranks(str(n), rows, 0) for n, rows in enumerate(sizes)], size)
    assert [len(mask) for mask in masks] == sizes
    total, taken = sum(sizes), sum(int(mask.sum()) for mask in masks)
    if size is None or not total:
        assert taken == 0
    elif isinstance(size, int):
        assert taken == min(size, total)
    else:
        assert taken == max(1, round(size * total))


def test_a_new_slice_changes_the_validation_of_few_others():
    ranks = [random_ranks(f"slice {n}", 1000, 7) for n in range(101)]
    before, after = validation_masks(ranks[:100], 0.01), validation_masks(ranks, 0.01)
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=False)]
    assert sum(same) >= 90
    assert 0 < after[100].sum() < 30
    spread = [int(mask.sum()) for mask in validation_masks(ranks, 0.1)]
    assert min(spread) > 50
    assert max(spread) < 150


def test_the_seed_and_the_slice_decide_what_is_set_aside():
    found = [
        validation_masks([random_ranks(key, 400, seed)], 40)[0].tolist()
        for key, seed in (("a", 0), ("a", 1), ("b", 0), ("a", 0))
    ]
    assert found[0] == found[3]
    assert found[0] != found[1]
    assert found[0] != found[2]


def test_a_new_slice_costs_its_own_features_only(tmp_path):
    rng = random.Random(5)
    parts = [[tokens(rng, 30) for _ in range(20)] for _ in range(4)]
    entries = [finished(tmp_path, part, name=str(n)) for n, part in enumerate(parts[:3])]
    entries.append(finished(tmp_path, parts[3], "avoid"))
    wishes = settings(deduplicate="near", val_set_size=3)
    select(entries, wishes)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")}
    assert len(made) == 3 * 3 + 2  # digests, bands and contamination; the avoided runs
    new = finished(tmp_path, [tokens(rng, 30) for _ in range(20)], name="new")
    select([*entries, new], wishes)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")}
    assert {path: after[path] for path in made} == made
    assert {path.name[:16] for path in after.keys() - made.keys()} == {new[0].key}
    whole = {path: path.read_bytes() for path in made}
    for path in made:
        path.write_bytes(whole[path][:-1])  # damaged: computed again, to the same values
    select(entries, wishes)
    assert {path: path.read_bytes() for path in made} == whole


def test_pairs_and_judged_answers_are_compared_by_all_that_they_say(tmp_path):
    pairs = [[1, 2, None, 3], [1, None, 2, 3], [1, 2, None, 3], [1, 2, None, 4]]
    entries = [finished(tmp_path, pairs, kind="preference")]
    selection = select(entries, settings(kind="preference", deduplicate="exact"))
    assert stored(entries, selection) == [[0, 1, 3]]
    # The same answer is judged good and bad: neither verdict is a copy of the other.
    for judged, kept in (
        ([[1, 2], [0, 2], [1, 2], [0, 2]], [0, 1]),
        ([[0, 2], [1, 2], [1, 3], [0, 2], [0, 3]], [0, 1, 2, 4]),
    ):
        entries = [finished(tmp_path, judged, kind="kto")]
        selection = select(entries, settings(kind="kto", deduplicate="exact"))
        assert stored(entries, selection) == [kept]
    rng = random.Random(6)
    prompt, answers = tokens(rng, 30), [tokens(rng, 30) for _ in range(3)]
    near = [
        [*prompt, *answers[0], None, *prompt, *answers[1]],
        [*prompt, *answers[0], None, *prompt, *answers[2]],
        [*prompt, *answers[0], 77, None, *prompt, *answers[1]],
    ]
    entries = [finished(tmp_path, near, kind="preference")]
    selection = select(entries, settings(kind="preference", deduplicate="near"))
    assert stored(entries, selection) == [[0, 1]]


def test_a_split_or_a_source_without_samples_is_refused(tmp_path):
    entries = [finished(tmp_path, [[1], [2]]), finished(tmp_path, [[1], [2]], dataset=1)]
    with pytest.raises(StageError, match=r"takes 4 samples.* only 4.*\n.*val_set_size"):
        select(entries, settings(2, val_set_size=9))
    select(entries, settings(2, deduplicate="exact"))
    with pytest.raises(StageError, match=r"source-1 \(data\.datasets\.1\).*random draws from it"):
        select(entries, settings(2, deduplicate="exact", mix_strategy="random"))
    mix = (MixSettings(), MixSettings(weight=1e-12))
    with pytest.raises(StageError, match=r"source-1 .* so small a weight .* draws"):
        select(entries, settings(2, mix_strategy="interleave_over", mix=mix))
