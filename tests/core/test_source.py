import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.sources.local_files import missing_path_error
from penstock.core.sources.pin import pin_data, pin_model, pin_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path):
    here = tmp_path / "mine"
    here.mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        (here / name).write_text(f'{{"text": "{name}"}}\n')
    (here / "README.txt").write_text("about")
    (here / ".hidden.jsonl").write_text("{}")
    return here


def test_a_touched_or_moved_folder_keeps_its_key_and_a_changed_one_does_not(folder, tmp_path):
    before = pin_data(str(folder))
    os.utime(folder / "a.jsonl", (1, 1))
    assert pin_data(str(folder)).key == before.key
    moved = tmp_path / "elsewhere" / "mine"
    shutil.copytree(folder, moved)
    assert pin_data(str(moved)).key == before.key
    assert str(tmp_path) not in str(before.pin)
    (folder / "a.jsonl").write_text('{"text": "A.jsonl"}\n')  # of the same size
    assert pin_data(str(folder)).key != before.key


def test_a_folder_gives_its_data_files_sorted_and_data_files_keep_the_users_order(folder):
    assert [path.name for path in pin_data(str(folder)).paths] == ["a.jsonl", "b.jsonl"]
    named = pin_data(str(folder), data_files=["b.jsonl", "a.jsonl"])
    assert [file["name"] for file in named.pin["files"]] == ["b.jsonl", "a.jsonl"]
    assert named.key != pin_data(str(folder), data_files=["a.jsonl", "b.jsonl"]).key
    assert len(pin_data(str(folder / "*.jsonl")).paths) == 2


def test_files_named_after_splits_are_not_mixed(tmp_path):
    for name in ("train-00000.jsonl", "test.jsonl", "train-00001.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    names = [path.name for path in pin_data(str(tmp_path)).paths]
    assert names == ["train-00000.jsonl", "train-00001.jsonl"]
    assert [p.name for p in pin_data(str(tmp_path), split="test").paths] == ["test.jsonl"]
    (tmp_path / "only").mkdir()
    shutil.copy(tmp_path / "test.jsonl", tmp_path / "only")
    assert [p.name for p in pin_data(str(tmp_path / "only")).paths] == ["test.jsonl"]
    with pytest.raises(ConfigError, match=r"no file for the split 'train'"):
        pin_data(str(tmp_path / "only"), split="train")
    with pytest.raises(ConfigError, match=r"no file for the split 'validation'"):
        pin_data(str(tmp_path), split="validation")
    # Some of the files bear the name, and the others would be trained on under it.
    with pytest.raises(ConfigError, match="do not contain that split"):
        pin_data(str(tmp_path / "*.jsonl"), split="test")


@pytest.mark.parametrize(
    ("typed", "options", "says"),
    [
        ("{}/c.jsonl", {}, "c.jsonl does not exist"),
        ("{}/a.json", {}, r"did you mean .*a\.jsonl"),
        ("{}/nowhere/a.jsonl", {}, "neither does the folder"),
        ("{}/*.csv", {}, "matches no file"),
        ("{}", {"ds_type": "parquet"}, "no file that ends in .parquet"),
        ("{}", {"data_files": ["a.jsonk"]}, "did you mean .*a.jsonl"),
        ("{}/a.jsonl", {"split": "test"}, "do not contain that split"),
        ("{}/a.jsonl", {"split": "train[:10%]"}, "slices of a split"),
        ("{}/a.jsonl", {"revision": "main"}, "Leave revision out"),
        ("builtin:arithmetic", {"name": "x"}, "name is 'x', but builtin:arithmetic is built in"),
        ("builtin:arithmetic", {"split": "test"}, "built in and has no split.\n  Leave split out"),
        ("builtin:arithmetic", {"revision": "v1"}, "built in and has no revision"),
        ("dummy", {"data_files": ["x"]}, "dummy is built in and has no files"),
        ("builtin:algebra", {}, "builtin:arithmetic, builtin:shapes, dummy"),
        ("./org/name", {}, "./org/name does not exist"),
        ("", {}, "a path is empty"),
    ],
)
def test_what_cannot_be_found_is_named_as_it_was_typed(folder, typed, options, says):
    with pytest.raises(ConfigError, match=says):
        pin_data(typed.format(folder), **options)


def test_a_file_of_unknown_kind_needs_ds_type(tmp_path):
    (tmp_path / "rows.data").write_text("{}\n")
    with pytest.raises(ConfigError, match="Write ds_type"):
        pin_data(str(tmp_path / "rows.data"))
    assert pin_data(str(tmp_path / "rows.data"), ds_type="json").pin["label"] == "rows.data"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_a_fault_of_the_settings(folder):
    (folder / "a.jsonl").chmod(0)
    with pytest.raises(ConfigError, match="permission denied"):
        pin_data(str(folder / "a.jsonl"))


def test_a_commit_needs_no_network_and_its_other_fields_are_identity():
    one = pin_data("org/data", revision=COMMIT)
    assert one.pin["commit"] == COMMIT
    others: list[dict[str, Any]] = [{"name": "x"}, {"split": "test"}, {"data_files": "a.parquet"}]
    assert len({one.key, *(pin_data("org/data", revision=COMMIT, **o).key for o in others)}) == 4


def test_offline_a_hub_id_needs_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CapabilityError, match=r"org/data is neither .* .HF_HUB_OFFLINE is set"):
        pin_data("org/data")
    refs = tmp_path / "datasets--org--data" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    assert pin_data("org/data").pin["commit"] == COMMIT
    with pytest.raises(CapabilityError):
        pin_data("org/data", revision="../../secret")


def test_a_tokenizer_is_pinned_by_what_it_does_and_a_model_by_its_weights(tmp_path):
    for name in ("tokenizer.json", "config.json", "model.safetensors", "notes.md"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    tokenizer, model = pin_tokenizer(str(tmp_path)), pin_model(str(tmp_path))
    assert [path.name for path in model.paths] == ["config.json", "model.safetensors"]
    (tmp_path / "model.safetensors").write_text("other")
    assert pin_tokenizer(str(tmp_path)).key == tokenizer.key
    assert pin_model(str(tmp_path)).key != model.key
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert pin_tokenizer(str(tmp_path)).key != tokenizer.key


def test_a_tokenizer_that_does_not_name_its_class_depends_on_config_json(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    before = pin_tokenizer(str(tmp_path)).key
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert pin_tokenizer(str(tmp_path)).key != before


def test_folders_without_a_tokenizer_or_a_model_are_refused(folder):
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        pin_tokenizer(str(folder))
    with pytest.raises(ConfigError, match=r"neither config.json nor \*.safetensors"):
        pin_model(str(folder))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "generation_config.json", "a.model"])
@pytest.mark.parametrize("link", ["nowhere", "/dev/zero"])
def test_a_file_of_a_model_that_is_none_is_refused_rather_than_left_out(tmp_path, name, link):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).symlink_to(link)
    with pytest.raises(ConfigError, match=f"{name} is a link that leads nowhere, a device"):
        pin_tokenizer(str(tmp_path))


def test_an_error_of_the_disk_names_the_file(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"Input/output error: .*a\.jsonl"):
        pin_data(str(tmp_path / "a.jsonl"))


def test_every_built_in_model_brings_the_same_tokenizer():
    assert pin_tokenizer("builtin:tiny-qwen3").key == pin_tokenizer("builtin:bytes").key
    with pytest.raises(ConfigError, match="builtin:tiny-qwen3"):
        pin_model("builtin:huge")


def test_a_hub_that_cannot_be_reached_is_not_asked_again_for_every_repository(tmp_path):
    """Its client repeats each request for a quarter of a minute."""
    script = (
        "import time\n"
        "from penstock.core.errors import UnreachableError\n"
        "from penstock.core.sources.pin import pin_data, pin_model, pin_tokenizer\n"
        "began = time.monotonic()\n"
        "for ask in (pin_model, pin_tokenizer, pin_data):\n"
        "    try:\n"
        "        ask('org/name')\n"
        "    except UnreachableError:\n"
        "        pass\n"
        "print(time.monotonic() - began)\n"
    )
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": tmp_path}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 10, done.stdout


def test_a_path_that_the_system_refuses_is_not_called_missing():
    error = missing_path_error("x" * 300 + "/data.jsonl")
    assert str(error).endswith("x/data.jsonl cannot be read: file name too long.")
