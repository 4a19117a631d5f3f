"""Samples with two answers in packed rows: what is laid into them, and what is made of it."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.core.cache.stage import Artifact
from penstock.core.errors import ConfigError, StageError
from penstock.core.files import write_json
from penstock.pack import spread
from penstock.pack.compare import compare
from penstock.pack.plan_rows import build_row_samples
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.rows.filter_rows import select_samples
from penstock.rows.prepared import PLAN, PreparedSamples
from penstock.rows.reader import PackedRows
from penstock.rows.row_length import SampleSizes, fitted_row_length
from penstock.rows.schema import IGNORED, PREPARED_SCHEMAS
from tests.stages.prepared import prepare, run, write_lines


def side(prompt, answer, *, masks_end=False):
    """Ids and labels of a prompt and an answer, all of which is trained, or all but its end."""
    kept = answer[:-1] if masks_end else answer
    labels = [IGNORED] * len(prompt) + kept + [IGNORED] * (len(answer) - len(kept))
    return prompt + answer, labels


def stored(folder, kind, samples, split="train"):
    """A prepared artifact of pairs of sides, or of sides and verdicts."""
    columns = {name: [] for name in PREPARED_SCHEMAS[kind].names}
    for number, sample in enumerate(samples):
        names = ("chosen_", "rejected_") if kind == "preference" else ("",)
        for name, (ids, labels) in zip(names, sample, strict=False):
            columns[f"{name}input_ids"].append(ids)
            columns[f"{name}labels"].append(labels)
        columns["row"].append(number)
        if kind == "kto":
            columns["desirable"].append(sample[1])
    columns["source"] = pa.array(["a"] * len(samples)).dictionary_encode()
    file = f"data/{split}/slice.arrow"
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(folder / file, PREPARED_SCHEMAS[kind]) as writer:
        writer.write_table(pa.table(columns, schema=PREPARED_SCHEMAS[kind]), max_chunksize=7)
    part = {"dataset": 0, "rows": len(samples), "slice": "0" * 16}
    splits = {"train": [], "validation": [], split: [{"file": file, "parts": [part]}]}
    mix = {"seed": 1, "weights": [1.0], "shuffle_merged_datasets": False}
    write_json(folder / PLAN, {"kind": kind, "mix": mix, "splits": splits})
    return Artifact("prepare", "0" * 64, folder)


def packed(prepared, out, **its: Any):
    out.mkdir(parents=True)
    workers = its.pop("workers", 1)
    facts = Pack(PackSettings(**its), prepared, workers, "fork").run(out)
    return PackedRows(out / "data" / "train"), facts


def branching_of(rows, index=0):
    found = rows.row(index).branching
    assert found is not None
    return found


def branches(rows):
    """Of every sample by its digest: ids and labels of its two answers, each after its prompt, and
    the verdict. Positions are counted on the way."""
    found = {}
    for index in range(len(rows)):
        row = rows.row(index)
        of = branching_of(rows, index)
        assert sum(of.documents()) == len(row.input_ids) == len(row.labels)
        assert of.documents() == row.lengths.tolist()
        branch_T, position_T = of.branch_of_tokens(), of.positions()
        starts = np.concatenate([[0], np.cumsum(of.documents())])
        both = []
        for branch in range(len(of.branches)):
            document = branch * len(of.prompts) // len(of.branches)
            here = np.arange(starts[document], starts[document + 1])
            seen = here[(branch_T[here] == -1) | (branch_T[here] == branch)]
            assert position_T[seen].tolist() == list(range(len(seen)))
            assert (row.labels[here[branch_T[here] == -1]] == IGNORED).all()
            both.append((row.input_ids[seen].tolist(), row.labels[seen].tolist()))
        for number, digest in enumerate(of.samples):
            verdict = of.desirable[number] if of.desirable else None
            assert digest not in found
            found[digest] = (*both[2 * number : 2 * number + 2], verdict)
    return found


def shifted(ids, labels):
    return ids[:-1], labels[1:]


def random_pairs(count, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        sizes = (rng.integers(1, 20), *rng.integers(1, 15, 2))
        prompt, *answers = (rng.integers(0, 250, size).tolist() for size in sizes)
        # An answer's last token may be the target of none, if it is not its only one.
        found.append([side(prompt, a, masks_end=number % 3 == 0 and len(a) > 1) for a in answers])
    return found


@pytest.mark.parametrize("method", ["sequential", "multipack"])
def test_every_answer_follows_its_prompt_whether_that_is_shared_or_not(tmp_path, method):
    pairs = random_pairs(40)
    prepared = stored(tmp_path / "p", "preference", pairs)
    its = {"sample_packing_method": method, "sample_packing_sequence_len": 120}
    shared, facts = packed(prepared, tmp_path / "a", **its)
    apart, more = packed(prepared, tmp_path / "b", share_prompts=False, **its)
    want = [(shifted(*chosen), shifted(*rejected), None) for chosen, rejected in pairs]
    found = branches(shared)
    assert branches(apart) == found
    assert sorted(found.values()) == sorted(want)
    assert shared.kind == apart.kind == "preference"
    answers = [labels for chosen, rejected, _ in want for _, labels in (chosen, rejected)]
    for told, rows, documents in ((facts, shared, 40), (more, apart, 80)):
        assert told["documents"]["train"] == documents == rows.documents().sum()
        assert told["tokens"]["train"] == rows.lengths().sum()
        trained = sum(label != IGNORED for labels in answers for label in labels)
        assert told["trained_tokens"]["train"] == trained
    # All of a prompt but its last token is saved once.
    saved = sum(sum(branching_of(shared, index).prompts) for index in range(len(shared)))
    assert more["tokens"]["train"] - facts["tokens"]["train"] == saved > 0
    assert (facts["shared_tokens"]["train"], more["shared_tokens"]["train"]) == (saved, 0)
    assert facts["samples"]["train"] == more["samples"]["train"] == 40


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_samples_with_two_answers_are_not_wrapped(tmp_path, kind):
    samples = random_pairs(3) if kind == "preference" else [(side([1], [2]), True)] * 3
    prepared = stored(tmp_path / "p", kind, samples)
    why = rf"sample_packing_method is wrapped, .* {kind} samples cannot be cut.\n  Write sequential"
    with pytest.raises(ConfigError, match=why):
        packed(prepared, tmp_path / "out", sample_packing_method="wrapped")
    with pytest.raises(ConfigError, match=why):
        compare(prepared.path, PackSettings(sample_packing_method="wrapped"), 8)
    assert not [*(tmp_path / "out").rglob("*.arrow")]


def test_what_is_left_of_answers_without_a_prompt_is_laid_apart(tmp_path):
    # Cut from the start until nothing of the prompt is left; or no longer alike.
    pairs = [
        [side([], [1, 2, 3]), side([], [4, 5])],
        [([7, 8, 9], [-100, -100, 9]), ([6, 5, 4], [-100, -100, 4])],
        [side([1], [2]), side([1], [3, 4])],
    ]
    rows, facts = packed(stored(tmp_path / "p", "preference", pairs), tmp_path / "a")
    want = [(shifted(*chosen), shifted(*rejected), None) for chosen, rejected in pairs]
    assert list(branches(rows).values()) == want
    assert branching_of(rows).prompts == (0, 0, 0)
    assert facts["tokens"]["train"] == 2 + 1 + 2 + 2 + 1 + 2


def test_a_judged_answer_stands_beside_that_to_the_nearest_other_prompt_before_it(tmp_path):
    samples = [
        (side([1, 2], [10, 11]), True),
        (side([1, 2], [12]), False),
        (side([3], [13, 14, 15, 16]), True),
        (side([4, 5, 6], [17]), False),
    ]
    prepared = stored(tmp_path / "p", "kto", samples)
    want = [
        # Round the start.
        (side([1, 2], [10, 11]), side([1, 2], [17]), True),
        (side([1, 2], [12]), side([1, 2], [17]), False),
        (side([3], [13, 14, 15, 16]), side([3], [12]), True),
        # Longer than any sample, and whole.
        (side([4, 5, 6], [17]), side([4, 5, 6], [13, 14, 15, 16]), False),
    ]
    want = [(shifted(*own), shifted(*other), good) for own, other, good in want]
    rows, _ = packed(prepared, tmp_path / "a")
    assert list(branches(rows).values()) == want
    assert rows.kind == "kto"
    apart, _ = packed(prepared, tmp_path / "b", share_prompts=False, sample_packing_sequence_len=17)
    assert branches(apart) == branches(rows)
    assert len(apart) > len(rows)


@pytest.mark.parametrize(
    ("size", "others"), [(None, [4, 0, 1, 2, 3]), (2, [1, 0, 3, 2, 4]), (3, [2, 0, 1, 4, 3])]
)
def test_rotated_answers_are_those_of_the_sample_before_within_a_group(tmp_path, size, others):
    # Two of one prompt follow each other, which makes no difference.
    samples = [(side([1 + number // 2], [10 + number] * 3), True) for number in range(5)]
    prepared = stored(tmp_path / "p", "kto", samples)
    its = {"kl_pairing": "rotate", "kl_rotation_size": size, "kl_max_len": 3}
    rows, _ = packed(prepared, tmp_path / "a", **its)
    found = {own[1][-1] - 10: other[1][-1] - 10 for own, other, _ in branches(rows).values()}
    assert [found[number] for number in range(5)] == others


def test_a_pair_for_the_kl_estimate_is_cut_at_the_limit_of_samples_alone(tmp_path):
    samples = [(side([1] * 5, [2]), True), (side([3], [4] * 8), True)]
    prepared = stored(tmp_path / "p", "kto", samples)
    lengths = {}
    for limit in (None, 9, 7):
        rows, _ = packed(prepared, tmp_path / str(limit), kl_max_len=limit)
        lengths[limit] = sorted(len(ids) + 1 for _, (ids, _), _ in branches(rows).values())
    assert lengths == {None: [2, 13], 9: [2, 9], 7: [2, 7]}


def test_where_all_prompts_are_one_any_other_answer_serves(tmp_path):
    samples = [(side([1], [number]), True) for number in (5, 6, 7)]
    rows, _ = packed(stored(tmp_path / "p", "kto", samples), tmp_path / "a")
    for (_, own), (_, other), _ in branches(rows).values():
        assert own != other


def test_one_judged_answer_has_no_baseline(tmp_path):
    prepared = stored(tmp_path / "p", "kto", [(side([1], [2]), True)])
    with pytest.raises(StageError, match="one train sample of type kto"):
        packed(prepared, tmp_path / "a")


def test_a_digest_names_what_is_trained_and_nothing_else(tmp_path):
    first, second, third = random_pairs(3)
    (ids, labels), rejected = second
    masked = [(ids, [*labels[:-1], IGNORED]), rejected]
    found = []
    for name, some in (("a", [first, second, third]), ("b", [masked, second, third[::-1]])):
        rows, _ = packed(stored(tmp_path / name / "p", "preference", some), tmp_path / name / "out")
        found += branching_of(rows).samples
    assert found[1] == found[4], "wherever it stands"
    assert len(set(found)) == 5
    assert {len(digest) for digest in found} == {16}


def test_the_gap_between_scores_goes_with_its_pair(tmp_path):
    scores = [(9, 2.5), (3, 3), (7.25, -1), (1e3, 0)]
    records = [
        {"prompt": f"q{n}", "chosen": "yes" * n, "rejected": "no", "good": good, "bad": bad}
        for n, (good, bad) in enumerate(scores, 1)
    ]
    records.insert(1, {**records[0], "bad": 10})
    named = {"field_chosen_score": "good", "field_rejected_score": "bad"}
    path = write_lines(tmp_path / "scored.jsonl", records)
    stage = prepare((path, {"type": "preference", **named}), bad_rows_allowed=0.5)
    prepared, facts = run(stage, tmp_path / "p" / "x")
    assert facts["dropped"] == {"bad_value": 1}
    gaps = {n: good - bad for n, (good, bad) in enumerate(scores, 1)}
    for shares in (True, False):
        rows, _ = packed(
            prepared,
            tmp_path / str(shares),
            share_prompts=shares,
            sample_packing_method="multipack",
            sample_packing_sequence_len=200,
        )
        found = {}
        for index in range(len(rows)):
            row, of = rows.row(index), branching_of(rows, index)
            for place, sample in enumerate(of.samples):
                alone = select_samples(row, {sample})
                assert alone is not None
                assert alone.branching is not None
                assert alone.branching.score_gaps == of.score_gaps[place : place + 1]
                found[int((alone.labels == ord("y")).sum())] = of.score_gaps[place]
        assert found == gaps


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_a_row_of_unwritten_length_holds_any_sample_with_both_its_answers(tmp_path, kind):
    # Of one byte in prompts, and as many as the power of two above a side's length in answers.
    answers = [letter * 230 for letter in "abcd"]
    if kind == "kto":
        verdicts = [{"completion": answer, "label": True} for answer in answers]
        records = [{"prompt": str(n), **verdict} for n, verdict in enumerate(verdicts)]
    else:
        records = [
            {"prompt": str(n), "chosen": answer, "rejected": answer.upper()}
            for n, answer in enumerate(answers)
        ]
    path = write_lines(tmp_path / "records.jsonl", records)
    prepared, facts = run(prepare((path, {"type": kind})), tmp_path / "p" / "x")
    [upper] = facts["lengths"]["train"]
    its = {"row_length": "fitted", "sample_packing_sequence_len": 4096}
    for shares in (True, False):
        rows, _ = packed(prepared, tmp_path / str(shares), share_prompts=shares, **its)
        assert len(branches(rows)) == len(answers)
        assert int(upper) < rows.lengths().max() <= 2 * int(upper)
    sizes = SampleSizes.of_plan(json.loads((prepared.path / PLAN).read_text()))
    assert sizes == SampleSizes.of_facts(facts)
    assert fitted_row_length(sizes, 4096) == 2 * int(upper)


def test_pairs_longer_than_a_row_are_told_with_the_limit_that_makes_them_fit(tmp_path):
    pairs = [[side([1] * 6, [2] * 10), side([1] * 6, [3] * 9)]]
    prepared = stored(tmp_path / "p", "preference", pairs)
    with pytest.raises(StageError) as caught:
        packed(prepared, tmp_path / "a", sample_packing_sequence_len=23)
    message = str(caught.value)
    assert "are longer, with both answers, than a row of 23 tokens; the longest has 24" in message
    assert "data.datasets.0.max_seq_len to 12" in message
    cut = [[side([1], [2] * 11), side([1], [3] * 11)], [side([1], [2] * 11), side([1], [3] * 11)]]
    rows, _ = packed(
        stored(tmp_path / "q", "preference", cut), tmp_path / "b", sample_packing_sequence_len=23
    )
    assert rows.lengths().max() == 22


def test_several_processes_write_the_rows_that_one_writes(tmp_path, monkeypatch):
    prepared = stored(tmp_path / "p", "preference", random_pairs(40))
    its = {"num_shards": 3, "share_prompts": False, "sample_packing_sequence_len": 100}
    alone, _ = packed(prepared, tmp_path / "a", **its)
    monkeypatch.setattr(spread, "MIN_TOKENS_PER_PROCESS", 1)
    together, _ = packed(prepared, tmp_path / "b", workers=2, **its)
    assert branches(alone) == branches(together)


def test_ways_of_packing_are_compared_by_what_rows_hold(tmp_path):
    prepared = stored(tmp_path / "p", "preference", random_pairs(40))
    its: dict[str, Any] = {"sample_packing_sequence_len": 120}
    for shares in (True, False):
        settings = PackSettings(share_prompts=shares, **its)
        chosen = [one for one in compare(prepared.path, settings, 8) if one.chosen]
        rows, facts = packed(prepared, tmp_path / str(shares), share_prompts=shares, **its)
        assert [one.rows for one in chosen] == [len(rows)]
        assert chosen[0].fill == facts["fill"]["train"]


def test_real_pairs_take_two_thirds_of_the_tokens_of_padded_ones(shared, tmp_path):
    records = json.loads((shared / "data" / "preference" / "dpo_en_demo.json").read_text())[:40]
    path = write_lines(tmp_path / "demo.jsonl", records)
    artifact, _ = run(prepare((path, {"type": "preference"})), tmp_path / "p" / "x")
    samples = PreparedSamples(artifact.path, "train")
    together, apart = (
        int(build_row_samples(samples, PackSettings(share_prompts=shares)).sample_lengths().sum())
        for shares in (True, False)
    )
    # As it is usually done: both sides of two pairs in one batch, as long as its longest.
    batches = samples.lengths().reshape(-1, 2)
    padded = int(4 * batches.max(axis=1).sum())
    assert together < 0.8 * apart
    assert together < 0.65 * padded
