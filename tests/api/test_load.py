"""`penstock.load`: configs and overrides as Python has them mean what the command line's do."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.api.load import Sections
from penstock.api.overrides import format_value
from penstock.cli.run import Request
from penstock.config.loading.cli_overrides import parse_value, split_overrides
from penstock.config.schema.run import RunConfig, is_explicitly_set
from penstock.pipeline.plan import plan
from penstock.rows.tokenizer import byte_tokenizer
from penstock.train.launch.job import JOB, build_job
from penstock.train.stage import Train
from tests.cli.command import penstock, small_run


@pytest.fixture
def config(tmp_path):
    return small_run(tmp_path)


def as_typed(config, *words):
    """The config that the command line makes of these words."""
    _, overrides = split_overrides(words)
    return Request(config, tuple(overrides)).load()


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ((["train.lr=1e-5"], {}), ["--train.lr", "1e-5"]),
        ((["--train.lr=1e-5"], {}), ["--train.lr", "1e-5"]),
        ((["--train.lr 1e-5", "train.seed = 3"], {}), ["--train.lr", "1e-5", "--train.seed=3"]),
        ((["--train.lr", "1e-5", "train.seed=3"], {}), ["--train.lr", "1e-5", "--train.seed=3"]),
        (([{"train.lr": 1e-5}], {}), ["--train.lr", "1e-5"]),
        (([], {"train": {"lr": 1e-5, "seed": 3}}), ["--train.lr", "1e-5", "--train.seed", "3"]),
        (([], {"train": {"lr": np.float32(0.5)}}), ["--train.lr", "0.5"]),
        (([], {"train": {"output_dir": Path("a") / "b"}}), ["--train.output_dir", "a/b"]),
        (([], {"train": {"lr_warmup_steps": None}}), ["--train.lr_warmup_steps", "null"]),
        (
            ([], {"lora": {"enable_lora": True, "lora_target_modules": ("q_proj", "v_proj")}}),
            ["--lora.enable_lora", "true", "--lora.lora_target_modules", "[q_proj, v_proj]"],
        ),
        (
            ([], {"data": {"datasets.0.max_samples": 5}}),
            ["--data.datasets.0.max_samples", "5"],
        ),
        ((["train.lr=1", {"train.lr": 2.0}], {"train": {"lr": 3.0}}), ["--train.lr", "3.0"]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_overrides_mean_what_the_command_line_makes_of_them(config, given, typed):
    overrides, sections = given
    made = ps.load(config, *overrides, **sections).config
    assert made == as_typed(config, *typed)
    for name in (word.lstrip("-").partition("=")[0] for word in typed if word.startswith("--")):
        assert is_explicitly_set(made, name)


def test_text_of_a_mapping_stays_text_and_text_of_a_word_is_read_as_yaml(config):
    assert ps.load(config, pipeline={"name": "null"}).config.pipeline.name == "null"
    with pytest.raises(ps.ConfigError, match=r"--train\.lr"):
        ps.load(config, train={"lr": "1e-5"})
    assert ps.load(config, "train.lr=1e-5").config.train.lr == 1e-5


def test_mappings_and_checked_configs_are_taken_in_place_of_a_file(config):
    from_file = ps.load(config).config
    written = yaml.safe_load(config.read_text())
    assert ps.load(written).config == from_file
    assert ps.load(from_file).config is from_file
    faster = ps.load(from_file, train={"lr": 0.5}).config
    assert faster == as_typed(config, "--train.lr", "0.5")
    # What was not written stays unwritten, or rows would no longer be fitted to the data.
    del written["data"]["sample_packing_sequence_len"]
    again = ps.load(ps.load(written).config, train={"lr": 0.5}).config
    assert not is_explicitly_set(again, "data.sample_packing_sequence_len")


def test_paths_of_mappings_are_expanded_as_those_of_files(config, monkeypatch):
    monkeypatch.setenv("RESULTS", "somewhere")
    written = yaml.safe_load(config.read_text())
    written["train"]["output_dir"] = Path("$RESULTS") / "out"
    run = ps.load(written)
    assert run.config.train.output_dir == "somewhere/out"
    # Of a config that has been read, overrides alone are still to be expanded.
    costly = ps.load(written, train={"output_dir": "costs $$5"}).config
    assert costly.train.output_dir == "costs $5"
    again = ps.load(costly, data={"dataset_prepared_path": "$RESULTS/data"}).config
    assert again.train.output_dir == "costs $5"
    assert again.data.dataset_prepared_path == "somewhere/data"
    entry = {"path": "$RESULTS/rows.jsonl", "type": "text"}
    for change in ({"datasets.0.path": entry["path"]}, {"datasets": [entry]}):
        assert ps.load(costly, data=change).config.data.datasets[0].path == "somewhere/rows.jsonl"


def test_an_output_folder_stands_for_its_run(config, tmp_path):
    run = ps.load(config, train={"lr": 0.25})
    planned = plan(run.config)
    assert penstock("pack", config).code == 0
    train = planned.step("train")
    assert isinstance(train.stage, Train)
    job = build_job(
        train.artifact.key, run.config, planned.step("pack").artifact, train.stage.origin, tmp_path
    )
    job.write()
    assert (tmp_path / JOB).is_file()
    again = ps.load(tmp_path)
    assert again.config.train.lr == 0.25
    assert plan(again.config).step("train").artifact.key == train.artifact.key


def test_an_output_folder_stands_for_its_run_from_any_folder(tmp_path, monkeypatch):
    """Paths are those of where it began, also where another run's are here; hub ids stay ids."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        written = yaml.safe_load(small_run(folder).read_text())
        (folder / "turns.jinja").write_text(f"{folder.name} {{{{ messages }}}}")
    byte_tokenizer().save_pretrained(here / "tokens")
    data = {"datasets": [{"path": "ro*.jsonl", "type": "text"}], "chat_template": "turns.jinja"}
    written["data"] = {**data, "sample_packing_sequence_len": 256, "dataset_num_proc": 1}
    written["train"]["output_dir"] = "out"
    written["model"]["tokenizer_path"] = "tokens"
    del written["pipeline"]
    monkeypatch.chdir(here)
    began = plan(ps.load(written).config)
    assert ps.load(written, notify=lambda _: None).pack().status == "ran"
    train = began.step("train")
    assert isinstance(train.stage, Train)
    out = train.path.resolve()
    out.mkdir()
    packed = began.step("pack").artifact
    build_job(train.artifact.key, began.run, packed, train.stage.origin, out).write()
    monkeypatch.chdir(there)
    again = plan(ps.load(out).config)
    for first, second in zip(began.steps, again.steps, strict=True):
        assert second.artifact.key == first.artifact.key
        assert second.path == here / first.path
    assert again.run.model.config_source == "builtin:tiny-qwen3"
    moved = ps.load(out, train={"output_dir": "mine"}).config
    assert moved.train.output_dir == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ["--train.lrr", "1"],
        ["--trian.lr", "1"],
        ["--train.lr", "fast"],
        ["--train.lr_decay_style", "cosin"],
        ["--data.datasets.7.path", "x"],
        ["--lora.enable_qlora", "true", "--train.data_parallel_mode", "fsdp3"],
    ],
)
def test_errors_are_those_of_the_command_line(config, words):
    with pytest.raises(ps.ConfigError) as typed:
        as_typed(config, *words)
    settings = {n.removeprefix("--"): v for n, v in zip(words[::2], words[1::2], strict=True)}
    for overrides in (words, [f"{name}={value}" for name, value in settings.items()]):
        with pytest.raises(ps.ConfigError) as raised:
            ps.load(config, *overrides)
        assert str(raised.value) == str(typed.value)


@pytest.mark.parametrize(
    ("overrides", "sections", "expected"),
    [
        (["lr"], {}, r"^lr: no setting; write section\.field=value"),
        (["--train.lr"], {}, r"the value is missing"),
        ([], {"train": 1e-5}, r"train is 1e-05, and a section is a mapping"),
        ([], {"train": {"lr": object()}}, r"train\.lr: object is no plain value"),
        ([], {"train": {"lrr": 1}}, r"did you mean lr\?"),
        ([], {"trian": {"lr": 1}}, r"did you mean train\?"),
    ],
)
def test_what_sets_nothing_is_refused_by_name(config, overrides, sections, expected):
    with pytest.raises(ps.ConfigError, match=expected):
        ps.load(config, *overrides, **sections)


def test_a_missing_file_is_told_as_on_the_command_line(tmp_path):
    small_run(tmp_path)
    with pytest.raises(ps.ConfigError, match=r"did you mean .*run\.yaml"):
        ps.load(tmp_path / "ran.yaml")


def test_the_typed_sections_are_those_of_a_config():
    assert list(Sections.__annotations__) == list(RunConfig.model_fields)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(plain)
def test_every_plain_value_is_read_back_as_itself(value):
    found, wrong = parse_value(format_value(value))
    assert wrong is None
    assert found == value
    assert json.dumps(found) == json.dumps(value)  # 1 is not 1.0, nor true
