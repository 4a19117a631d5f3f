"""`penstock check`: what can be judged here is, and what cannot is said."""

import errno
import fcntl
import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.config.loading.load import load
from penstock.core.cache.stage import stage_key
from penstock.pipeline.plan import plan
from tests.cli.command import penstock, small_run

ASKS_THE_MODEL = {"dropout": {"ffn": 0.1}}
CHAT = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}


def chats(folder: Path, name: str = "chats.jsonl") -> str:
    """A file of conversations."""
    (folder / name).write_text(f"{json.dumps(CHAT)}\n" * 30)
    return str(folder / name)


@pytest.mark.parametrize("model", ["nobody/nothing-of-the-kind", "/nowhere/on/this/machine"])
def test_a_model_that_cannot_be_asked_is_left_unjudged(tmp_path: Path, model: str) -> None:
    config = small_run(tmp_path, model={"config_path": model}, train=ASKS_THE_MODEL)
    said = penstock("check", config)
    assert said.code == 0
    assert f"not checked against the model: {model}" in said.err
    assert yaml.safe_load(said.out)["model"]["config_path"] == model
    assert penstock("plan", config).code in (2, 3)


@pytest.mark.parametrize("train", [ASKS_THE_MODEL, {}], ids=["asks the model", "asks nothing"])
def test_a_folder_that_is_called_otherwise_here_is_a_fault(tmp_path: Path, train: dict) -> None:
    (tmp_path / "model").mkdir()
    wrong = str(tmp_path / "modle")
    config = small_run(tmp_path, model={"config_path": wrong}, train=train)
    said = penstock("check", config)
    assert said.code == 2
    assert "did you mean model" in said.err


def test_what_is_printed_is_what_was_written_and_all_of_it_is_the_same_run(tmp_path: Path) -> None:
    config = small_run(tmp_path, data={"datasets": [{"path": chats(tmp_path)}]})
    brief, whole = penstock("check", config), penstock("check", config, "--all")
    assert brief.code == whole.code == 0
    assert len(brief.out.splitlines()) < 40 < len(whole.out.splitlines())
    keys = []
    for name, text in (("brief", brief.out), ("whole", whole.out)):
        (tmp_path / f"{name}.yaml").write_text(text)
        steps = plan(load(tmp_path / f"{name}.yaml")).steps
        keys.append([stage_key(step.stage) for step in steps[:3]])
    assert (
        keys[0] == keys[1] == [stage_key(step.stage) for step in plan(load(Path(config))).steps[:3]]
    )


def test_every_fault_is_found_at_once_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = small_run(
        tmp_path,
        data={
            "datasets": [
                {"path": chats(tmp_path), "type": "sharegpt"},
                {"path": str(tmp_path / "chat.jsonl"), "type": "chat"},
                {"path": chats(tmp_path, "good.jsonl")},
            ]
        },
        train={"output_dir": str(tmp_path / "file" / "out")},
        lora={"enable_lora": True, "lora_target_modules": ["q_porj"]},
    )
    before = sorted(tmp_path.iterdir())
    said = penstock("check", config, "--json")
    assert said.code == 2
    looks = {look["at"]: look for look in said.last["looks"]}
    assert "did you mean q_proj?" in looks["model"]["text"]
    assert "They look like type: chat" in looks["data.datasets.0"]["text"]
    assert "did you mean chats.jsonl" in looks["data.datasets.1"]["text"]
    assert (
        "type: chat (inferred from its records); columns messages"
        in looks["data.datasets.2"]["text"]
    )
    assert "file is a file" in looks["train.output_dir"]["text"]
    faults = {at for at, look in looks.items() if look["status"] == "fault"}
    assert faults == {"model", "data.datasets.0", "data.datasets.1", "train.output_dir"}
    assert said.last["error"]["exit_code"] == 2
    assert sorted(tmp_path.iterdir()) == before


def test_targets_that_the_model_lacks_are_named_where_they_are_skipped(tmp_path: Path) -> None:
    lora = {"enable_lora": True, "lora_target_modules": ["q_proj", "fc1", "fc2"]}
    assert penstock("check", small_run(tmp_path, lora=lora)).code == 2
    skipping = small_run(tmp_path, lora={**lora, "missing_targets": "skip"})
    note = "lora.lora_target_modules: fc1, fc2 name no layer of this model"
    for command in ("check", "plan"):
        said = penstock(command, skipping)
        assert said.code == 0
        assert note in said.out + said.err
    lora["lora_target_modules"] = ["fc1", "fc2"]
    said = penstock("check", small_run(tmp_path, lora={**lora, "missing_targets": "skip"}))
    assert said.code == 2
    assert "'fc2' names no linear layer" in said.err


def test_a_folder_that_cannot_be_written_to_stops_a_run_before_it_prepares(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = small_run(
        tmp_path,
        data={"datasets": [{"path": chats(tmp_path)}]},
        train={"output_dir": str(tmp_path / "file" / "out")},
    )
    said = penstock("run", config)
    assert said.code == 2
    assert f"train.output_dir {tmp_path}/file/out cannot be written to" in said.err
    assert not list(tmp_path.glob("**/prepare"))


def test_a_folder_without_locks_stops_a_run_before_it_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    config = small_run(tmp_path, data={"datasets": [{"path": chats(tmp_path)}]})
    monkeypatch.setattr(fcntl, "flock", flock)
    for command in ("check", "run"):
        said = penstock(command, config)
        assert said.code == 2
        assert re.search(r"train\.output_dir:? .*has no locks \(flock\); name a folder", said.err)
    assert not list(tmp_path.glob("**/prepare"))


def test_a_file_of_which_no_record_can_be_read_is_a_fault_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"text": "café"}\n'.encode("latin-1") * 30)
    config = small_run(tmp_path, data={"datasets": [{"path": str(file)}]})
    said = penstock("check", config)
    assert said.code == 2
    assert "none of the first 20 records can be read: not UTF-8" in said.err


def test_a_type_that_was_inferred_is_judged_by_the_rules_as_the_plan_judges_it(
    tmp_path: Path,
) -> None:
    config = small_run(
        tmp_path,
        data={"datasets": [{"path": chats(tmp_path)}]},
        train={"objective": "preference"},
    )
    checked, planned = penstock("check", config), penstock("plan", config)
    assert checked.code == planned.code == 2
    for said in (checked, planned):
        assert "data.datasets.0.type: chat has no preference pairs" in said.err


def test_prepared_data_that_is_not_there_is_a_fault_with_its_path_and_a_remedy(
    tmp_path: Path,
) -> None:
    config = small_run(tmp_path, data={"skip_prepare_dataset": True})
    said = penstock("check", config)
    assert said.code == 2
    for line in (said.err, penstock("plan", config).err):
        assert f"data.dataset_prepared_path {tmp_path}/data" in line
        assert "data.skip_prepare_dataset is true" in line
    assert "set data.skip_prepare_dataset to false" in said.err
    prepared = penstock("prepare", config, "--data.skip_prepare_dataset", "false")
    assert prepared.code == 0
    (tmp_path / "rows.jsonl").unlink()  # which nothing reads now
    said = penstock("check", config)
    assert said.code == 0, said.err
    assert "is taken as it is (data.skip_prepare_dataset)" in said.err


@pytest.mark.parametrize(
    ("size", "fault"),
    [(11, None), (12, "takes 12"), (500, "takes 500"), (0.5, None), (0.99, "takes 12")],
)
def test_a_validation_split_that_takes_all_of_the_data_is_a_fault(
    tmp_path: Path, size: float, fault: str | None
) -> None:
    config = small_run(tmp_path, data={"val_set_size": size})
    said = penstock("check", config)
    assert said.code == (2 if fault else 0), said.err
    if fault:
        assert f"Validation {fault} samples, and the data has 12 at most" in said.err
        prepared = penstock("prepare", config)
        assert prepared.code != 0
        assert "Validation takes 12 samples, and there are only 12" in prepared.err
    else:
        assert "of at most 12 samples are held out" in said.err


def test_a_row_that_is_too_short_for_a_sample_is_a_fault_as_it_is_for_packing(
    tmp_path: Path,
) -> None:
    config = small_run(tmp_path, data={"sample_packing_sequence_len": 64})
    checked, packed = penstock("check", config), penstock("pack", config)
    for said in (checked, packed):
        assert said.code != 0
        assert "data.datasets.0.max_seq_len to 64" in said.err
    long = "at least 2 samples, among the first 12, are longer than a row of 64 tokens"
    assert long in checked.err
    assert "2 of 12 train samples are longer than a row of 64 tokens" in packed.err
    assert "the longest has 85" in packed.err
    for change in (
        ("--data.datasets.0.max_seq_len", "64"),
        ("--data.sample_packing_sequence_len", "85"),
        ("--data.sample_packing_method", "wrapped"),
    ):
        assert penstock("check", config, *change).code == 0, change
