"""Images that data names by path are part of cache keys, wherever they lie."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.config.loading.load import loads
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ConfigError
from penstock.pipeline.plan import plan
from tests.media.pictures import picture
from tests.media.tiny_processors import write_processor
from tests.stages.prepare.media.test_images import asking
from tests.stages.prepared import write_lines


@pytest.fixture
def model(tmp_path):
    return str(write_processor("qwen3_vl", tmp_path / "model"))


def key(tokenizer, path, **its):
    """The key of the prepare stage of a run."""
    run = {
        "model": {"config_path": "builtin:tiny-qwen3", "tokenizer_path": tokenizer},
        "data": {"datasets": [{"path": str(path), "type": "chat", **its}]},
        "train": {"output_dir": "out", "data_parallel_mode": "none"},
    }
    return stage_key(plan(loads(run), ("prepare",)).steps[0].stage)


def test_images_are_looked_for_in_image_folder_and_keyed_by_content(tmp_path, model):
    data = write_lines(tmp_path / "text" / "a.jsonl", [{"messages": asking("x/0.png")}])
    for folder in ("one", "other"):
        (tmp_path / folder / "x").mkdir(parents=True)
        (tmp_path / folder / "x" / "0.png").write_bytes(picture(1))
    missing = key(model, data)
    keys = [key(model, data, image_folder=str(tmp_path / name)) for name in ("one", "other")]
    assert keys[0] == keys[1] != missing
    (tmp_path / "one" / "x" / "0.png").write_bytes(picture(2))
    assert key(model, data, image_folder=str(tmp_path / "one")) != keys[0]
    shutil.copytree(tmp_path / "other" / "x", tmp_path / "text" / "x")
    assert key(model, data) == keys[0]
    with pytest.raises(ConfigError, match=r"data.datasets.0.image_folder is .*no folder"):
        key(model, data, image_folder=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="type: text does not read it"):
        key(model, data, type="text", image_folder=str(tmp_path / "one"))


def test_data_without_images_and_models_without_a_processor_have_the_keys_they_had(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr("penstock.pipeline.plan.check_media", lambda *_, **__: None)
    text = write_lines(tmp_path / "a.jsonl", [{"messages": asking()}])
    image = write_lines(tmp_path / "b.jsonl", [{"messages": asking("0.png")}])
    before = key(model, text), key("builtin:bytes", image), key(model, image)
    (tmp_path / "0.png").write_bytes(picture(1))
    after = key(model, text), key("builtin:bytes", image), key(model, image)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False]
    monkeypatch.setattr("penstock.pipeline.plan.has_processor_files", lambda _: False)
    assert key(model, text) == before[0]


def in_column(name):
    messages = [{"role": "user", "content": "<image> Which?"}]
    return {"messages": messages, "images": [{"path": name}]}


def in_parts(name):
    return {"messages": [{"role": "user", "content": asking(name)[0]["content"]}]}


def in_json(*names):
    return {"messages": json.dumps(asking(*names))}


@pytest.mark.parametrize("form", [in_column, in_parts, in_json], ids=lambda form: form.__name__)
def test_paths_in_columnar_files_are_found(tmp_path, model, form):
    rows = [form(name) for name in ("0.png", "1.png")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1)
    before = key(model, tmp_path / "a.parquet")
    (tmp_path / "1.png").write_bytes(picture(1))
    assert key(model, tmp_path / "a.parquet") != before


def test_paths_in_the_last_of_several_row_groups_are_found(tmp_path, model):
    texts = [in_json()["messages"]] * 2999 + [in_json("0.png")["messages"]]
    pq.write_table(pa.table({"messages": texts}), tmp_path / "a.parquet", row_group_size=1000)
    before = key(model, tmp_path / "a.parquet")
    (tmp_path / "0.png").write_bytes(picture(1))
    assert key(model, tmp_path / "a.parquet") != before


def dictionary(form):
    """A column whose texts are in a dictionary."""
    if form is in_json:
        return pa.array([in_json("0.png")["messages"]] * 3).dictionary_encode()
    texts = pa.dictionary(pa.int32(), pa.string())
    part = pa.struct([("type", texts), ("path", pa.string()), ("text", pa.string())])
    turn = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    return pa.array([in_parts("0.png")["messages"]], pa.list_(turn))


@pytest.mark.parametrize("form", [in_json, in_parts], ids=lambda form: form.__name__)
def test_paths_in_dictionaries_are_found(tmp_path, model, form):
    table = pa.table({"messages": dictionary(form)})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    before = key(model, tmp_path / "a.arrow")
    (tmp_path / "0.png").write_bytes(picture(1))
    assert key(model, tmp_path / "a.arrow") != before


def test_records_without_images_are_not_parsed(tmp_path, model, monkeypatch):
    said = [{"role": "user", "content": "an image of images"}, asking()[1]]
    text = write_lines(tmp_path / "a.jsonl", [{"messages": said}] * 3)
    pq.write_table(pa.Table.from_pylist([{"messages": said}] * 3), tmp_path / "a.parquet")
    monkeypatch.setattr("penstock.prepare.readers.image_pins.parse_record", lambda *_: 1 / 0)
    key(model, text)
    key(model, tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": asking("0.png")}, "chat"),
        ({"conversations": [{"from": "human", "value": "<image>"}], "image": "0.png"}, "sharegpt"),
        ({"instruction": "<image>", "output": "x", "images": ["0.png"]}, "alpaca"),
        ({"text_info": [{"text": "x", "tag": "mask"}], "image_info": []}, "sft_turns"),
    ],
    ids=["chat", "sharegpt", "alpaca", "sft_turns"],
)
def test_the_type_of_data_with_images_is_inferred(tmp_path, model, record, kind):
    data = write_lines(tmp_path / "a.jsonl", [record] * 2)
    assert key(model, data, type=None) == key(model, data, type=kind)
