"""Settings on the command line."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading.cli_overrides import Override, apply, split_overrides
from penstock.config.loading.load import load, loads
from penstock.core.errors import ConfigError
from tests.config.values import smallest


def test_overrides_are_parted_from_other_words() -> None:
    words = ["run", "a.yaml", "--train.lr", "2e-5", "--json", "--train.seed=3", "--force", "pack"]
    rest, found = split_overrides([*words, "--model.foundation", "{a: 1}"])
    assert rest == ["run", "a.yaml", "--json", "--force", "pack"]
    assert found == [
        Override("train.lr", "2e-5"),
        Override("train.seed", "3"),
        Override("model.foundation", "{a: 1}"),
    ]


def test_value_may_begin_with_a_minus_only_as_a_number() -> None:
    _, found = split_overrides(["--train.data_parallel_shard_size", "-1", "--train.lr", "-.5"])
    assert [given.text for given in found] == ["-1", "-.5"]
    with pytest.raises(ConfigError) as refusal:
        split_overrides(["--train.lr", "-x", "--train.seed", "--json", "--model.merge_qkv"])
    assert str(refusal.value).splitlines() == [
        "--train.lr: -x looks like an option; if it is the value, write --train.lr=-x",
        "--train.seed: the value is missing; write --train.seed VALUE or --train.seed=VALUE",
        "--model.merge_qkv: the value is missing; write --model.merge_qkv VALUE or"
        " --model.merge_qkv=VALUE",
    ]


def test_words_after_a_double_dash_are_left_alone() -> None:
    assert split_overrides(["a", "--", "--train.lr", "1"]) == (["a", "--", "--train.lr", "1"], [])


def overridden(*words: str, **sections: dict[str, Any]) -> Any:
    return loads(smallest(**sections), split_overrides(words)[1])


def test_overrides_reach_every_kind_of_place() -> None:
    run = overridden(
        "--lora.enable_lora=true",
        "--lora.lora_target_modules", "[q_proj, v_proj]",
        "--data.datasets.0.path", "x.jsonl",
        "--data.datasets.1.path", "y.jsonl",
        "--model.foundation.num_hidden_layers", "4",
        "--launch.env.OMP_NUM_THREADS", "1",
        "--data.val_set_size=0.1",
        "--train.lr", "3e-5",
    )  # fmt: skip
    assert run.train.lr == 3e-5
    assert run.lora.enable_lora
    assert run.lora.lora_target_modules == ["q_proj", "v_proj"]
    assert [entry.path for entry in run.data.datasets] == ["x.jsonl", "y.jsonl"]
    assert run.model.foundation == {"num_hidden_layers": 4}
    assert run.launch.env == {"OMP_NUM_THREADS": "1"}
    assert run.data.val_set_size == 0.1


def test_override_leaves_the_settings_it_was_given_alone() -> None:
    settings = smallest()
    changed, faults = apply(settings, [Override("data.datasets.0.path", "other")])
    assert not faults
    assert changed["data"]["datasets"][0]["path"] == "other"
    assert settings == smallest()


def test_override_of_one_setting_of_an_entry_keeps_its_others_and_all_other_entries() -> None:
    entries = [{"path": "a", "type": "chat"}, None, {"path": "c", "weight": 2}]
    changed, faults = apply(
        {"data": {"datasets": entries, "val_set_size": 0.1}},
        [
            Override("data.datasets.0.path", "x"),
            Override("data.datasets.1.path", "y"),
            Override("data.datasets.2.weight", "3"),
            Override("data.datasets.3.path", "z"),
        ],
    )
    assert not faults
    assert changed == {
        "data": {
            "datasets": [
                {"path": "x", "type": "chat"},
                {"path": "y"},
                {"path": "c", "weight": 3},
                {"path": "z"},
            ],
            "val_set_size": 0.1,
        }
    }


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--train.lrr=3", "--train.lrr: unknown field; did you mean lr?"),
        ("--train.lr=fast", "--train.lr: is the text fast; wanted a number: for example 5e-05"),
        ("--train.lr.x=3", "--train.lr.x: train.lr: is a mapping; wanted a number"),
        ("--train.output_dir.x=3", "--train.output_dir.x: train.output_dir is a single value"),
        ("--data.datasets.path=x", "--data.datasets.path: data.datasets is a list"),
        ("--data.datasets.2.path=x", "--data.datasets.2.path: data.datasets has 1 entries"),
        ("--data.datasets=[{path: 3}]", "--data.datasets: data.datasets.0.path: is 3"),
        ("--train.seed=[1", "--train.seed: '[1' is not a YAML value"),
        ("--trian.seed=1", "--trian.seed: trian: unknown section; did you mean train?"),
    ],
)
def test_fault_of_an_override_names_the_override(word: str, line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        overridden(word)
    assert str(refusal.value).startswith(line)
    assert "\n" not in str(refusal.value)


def test_faults_of_overrides_follow_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {config_path: x}\ndata:\n  datasets: [{path: 3}]\n"
        "train:\n  output_dir: o\n  lr: x\n  sed: 1\n"
    )
    with pytest.raises(ConfigError) as refusal:
        load(file, split_overrides(["--train.gc_steps=-1", "--train.lr=y"])[1])
    starts = [line.split(": ", 1)[0] for line in str(refusal.value).splitlines()]
    assert starts == [f"{file}:3", f"{file}:7", "--train.gc_steps", "--train.lr"]
