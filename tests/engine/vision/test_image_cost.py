"""Rows of a step are balanced over replicas by the work on their images too."""

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import transformers

from penstock.engine.vision.image_cost import build_image_cost
from penstock.models.flops import flops_per_pair, pairs_per_token
from penstock.models.registry import get_family
from penstock.rows.batches import assign_micro_batches
from penstock.rows.reader import PackedRows
from penstock.rows.schema import packed_schema
from penstock.train.row_costs import row_costs
from tests.engine import runs

TOKENS = 2000
IMAGES = [[1024], [], [256] * 4, [64], [1024], [512, 512], [], [16]]
"""Tokens of the images of each row, of which all have as many tokens."""


def write_rows(folder, images):
    schema = packed_schema("sft", has_images=True)
    rows = [
        {
            "input_ids": [7] * TOKENS,
            "labels": [-100] * TOKENS,
            "lengths": [TOKENS],
            "images": [bytes(32)] * len(each),
            "image_tokens": each,
        }
        for each in images
    ]
    with pa.ipc.new_file(str(folder / "rows-0.arrow"), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema), max_chunksize=3)
    return PackedRows(folder)


def built(tmp_path, model_type, *, images=True, **settings) -> Any:
    """What costs depend on of a model of the published size."""
    hf_config = transformers.AutoConfig.for_model(model_type).to_dict()
    config = get_family(hf_config).read(hf_config)
    run = runs.run_config(tmp_path / "out", tmp_path / "model", **settings)
    cost = build_image_cost(run, hf_config, config, images=images)
    return SimpleNamespace(
        pairs_per_token=pairs_per_token(config), image_cost=cost, unit=flops_per_pair(config)
    )


def test_the_cost_of_an_image_is_of_its_patches_and_their_squares(tmp_path):
    rows = write_rows(tmp_path, IMAGES)
    model = built(tmp_path, "qwen3_vl", model={"freeze": []})
    text, total = row_costs(model, rows)
    assert text.tolist() == [model.pairs_per_token * TOKENS + TOKENS**2] * len(IMAGES)
    width, inner, layers, outer, patches = 1152, 4304, 27, 3584, 4
    tower = layers * (4 * width**2 + 2 * width * inner) + 2 * 3 * 16**2 * width
    mergers = 4 * (4 * width) * (4 * width + outer)
    for tokens, cost in zip(IMAGES, (total - text).tolist(), strict=True):
        squares = sum((patches * each) ** 2 for each in tokens)
        flops = 6 * (tower * patches + mergers) * sum(tokens) + 12 * width * layers * squares
        assert cost == flops // model.unit
    frozen = row_costs(built(tmp_path, "qwen3_vl"), rows)
    assert ((total - text)[0] / (frozen.total - frozen.text)[0]) == pytest.approx(3, rel=1e-3)
    # Ranks of a group divide the images as they divide the tokens.
    pair = built(tmp_path, "qwen3_vl", model={"freeze": []}, tensor_parallel_size=2)
    assert row_costs(pair, rows).total.tolist() == total.tolist()


def test_tiles_do_not_attend_to_one_another(tmp_path):
    rows = write_rows(tmp_path, [[576], [5 * 576]])
    text, total = row_costs(built(tmp_path, "llava_next"), rows)
    one, five = (total - text).tolist()
    assert five == pytest.approx(5 * one, abs=5)


def test_replicas_get_the_same_work_of_the_same_rows(tmp_path):
    rows = write_rows(tmp_path, IMAGES)
    text, total = row_costs(built(tmp_path, "qwen3_vl", model={"freeze": []}), rows)

    def dealt(costs):
        found = assign_micro_batches(
            range(len(rows)), costs.tolist(), num_replicas=2, size=4, count=1
        )
        assert sorted(row for [group] in found for row in group) == [*range(len(rows))]
        sums = [int(total[group].sum()) for [group] in found]
        return (max(sums) - min(sums)) / max(sums)

    assert dealt(total) < 0.03
    assert dealt(text) > 3 * dealt(total)


def test_without_images_in_the_step_rows_cost_what_their_tokens_do(tmp_path):
    rows = write_rows(tmp_path, IMAGES)
    encodes = {"data": {"encode_images": True}, "model": {"model_path": str(tmp_path)}}
    for model in (
        built(tmp_path, "qwen3_vl", images=False),
        built(tmp_path, "qwen3_vl", **encodes),
        built(tmp_path, "qwen3"),
    ):
        assert model.image_cost is None
        assert row_costs(model, rows).total.tolist() == row_costs(model, rows).text.tolist()
