"""Micro-batches of models that compute padded batches are run in parts of similar length."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine import split_by_length
from penstock.engine.split_by_length import cut, num_sub_batches, padded_tokens
from penstock.rows.collate import collate
from penstock.rows.reader import PackedRows
from tests.engine import loops
from tests.engine.automodel import examine, tiny_models
from tests.ranks import on_ranks
from tests.turns import one_day_in


def _fewest(lengths: list[int], number: int) -> int:
    """By trying every cut of the sorted documents."""
    ordered = sorted(lengths)
    return min(
        sum(
            (end - start) * max(ordered[start:end])
            for start, end in zip((0, *cuts), (*cuts, len(ordered)), strict=True)
        )
        for count in range(min(number, len(ordered)))
        for cuts in combinations(range(1, len(ordered)), count)
    )


def test_documents_are_cut_into_groups_with_the_fewest_padded_tokens():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 9, size=8).tolist()
        for number in (1, 2, 3, 8):
            groups = cut(lengths, number)
            assert sorted(one for group in groups for one in group) == list(range(8))
            assert len(groups) <= number
            assert padded_tokens(groups, lengths) == _fewest(lengths, number)


def _trained(folder: Path, most: int) -> tuple[float, float, loops.Arrays, list[int]]:
    """Loss of a step, loss of an evaluation, gradients, and the padded tokens of each forward
    pass."""
    split_by_length.MAX_SUB_BATCHES = most
    # Padding documents, and another number of documents on each rank.
    job = examine.job_of(
        folder, f"parts-{most}", max_grad_norm=0.0, data={"pad_to_multiple_of": 64}
    )
    loop = loops.loop_of(job)
    gradients = loops.before_each_update(loop, lambda: loops.gradients_of(loop))
    [model] = loop.built.engine.model.parts
    rows = PackedRows(folder.parent / "packed" / "data" / "train")
    evaluated = loops.evaluated(loop, rows)["eval_loss"]
    sizes = loops.calls_of(model, lambda args: len(args[2].lengths) * args[2].max_length)
    return loops.step(loop)["loss"], evaluated, gradients[0], sizes


def _both(folder: Path) -> list[tuple[float, float, loops.Arrays, list[int]]]:
    return [_trained(folder, most) for most in (1, 8)]


@one_day_in(3, of=1)
def test_parts_of_a_micro_batch_give_its_loss_and_gradients_with_less_padding(tmp_path):
    examine.write_rows(tmp_path)
    tiny_models.write_described(tmp_path / "model", "mamba")
    found = on_ranks(2, _both, tmp_path / "model")
    (loss, evaluated, gradients, one_call), (other, again, others, parts) = found[0]
    assert other == pytest.approx(loss, rel=1e-6)
    assert again == pytest.approx(evaluated, rel=1e-6)
    for name, value in gradients.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert len(one_call) == 2
    assert len(parts) == len(found[1][1][3]) > 2
    assert sum(parts) < 0.8 * sum(one_call)


def test_a_micro_batch_of_equal_documents_is_one_part_without_its_padding(tmp_path):
    examine.write_rows(tmp_path)
    rows = PackedRows(tmp_path / "packed" / "data" / "train")
    [batch] = collate([[rows.row(0)]], pad_to_multiple_of=512).micro_batches()
    [(part, tokens_T)] = split_by_length.split_by_length(batch, 1)
    assert part.num_tokens == batch.num_tokens == len(tokens_T) == sum(part.lengths)
    assert torch.equal(part.places().sort().values, batch.places()[: batch.num_tokens])
    [padding] = collate([[]], pad_to_multiple_of=512).micro_batches()
    assert num_sub_batches(padding) == 1
