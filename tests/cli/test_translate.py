"""`penstock translate`: another tool's file in our words, with a report of every key."""

import json
from pathlib import Path

import yaml

from penstock.config.loading.load import load
from tests.cli.command import penstock

THEIRS = """\
stage: SFT
model_name_or_path: Qwen/Qwen3-0.6B
train_dataset_path: data.jsonl
max_seq_len: 1024
learning_rate: 1e-5
output_dir: out
compute_type: bf16
fine_tuning: LoRA
tensor_parallel_degree: 4
gradient_accumulation_steps: 8
release_grads: true
"""


def written(folder: Path, text: str = THEIRS) -> Path:
    file = folder / "theirs.yaml"
    file.write_text(text)
    return file


def test_what_is_written_is_the_run_that_the_foreign_file_is(tmp_path: Path) -> None:
    theirs, ours = written(tmp_path), tmp_path / "ours" / "run.yaml"
    said = penstock("translate", theirs, "-o", ours, "--world-size", 1)
    assert said.code == 0
    assert said.out.strip() == str(ours)
    assert load(ours) == load(theirs)
    assert "lora_rank: 8  # assumed" in ours.read_text()
    report = json.loads((ours.parent / "translation_report.json").read_text())
    assert report["dialect"] == "erniekit"
    by_key = {line["key"]: line for line in report["keys"]}
    assert by_key["learning_rate"]["class"] == "maps"
    assert by_key["learning_rate"]["native"] == {"train.lr": 1e-5}
    assert by_key["release_grads"]["class"] == "no effect"
    assert by_key["tensor_parallel_degree"]["class"] == "approximated"
    assert sum(report["counts"].values()) == len(report["keys"])


def test_the_file_is_printed_and_the_report_said(tmp_path: Path) -> None:
    said = penstock("translate", written(tmp_path), "--world-size", 4)
    assert yaml.safe_load(said.out)["train"]["tensor_parallel_size"] == 4
    assert said.err.startswith("ERNIEKit, ")
    assert "fitted to 4 processes" in said.err
    blocks = [block.partition(" (")[0] for block in said.err.split("\n\n")[1:]]
    assert blocks == ["no effect", "assumed", "translated", "maps"]
    assert "  release_grads: true" in said.err


def test_json_ends_with_the_whole_report(tmp_path: Path) -> None:
    said = penstock("translate", written(tmp_path), "--json", "--world-size", 1)
    assert said.last["ok"]
    assert said.last["config"]["train"]["lr"] == 1e-5
    assert {line["key"] for line in said.last["keys"]} >= {"stage", "adam_beta2"}


def test_keys_that_nobody_knows_are_told_and_refused_if_asked(tmp_path: Path) -> None:
    theirs, ours = written(tmp_path, f"{THEIRS}learning_rat: 3\n"), tmp_path / "ours.yaml"
    assert "did you mean learning_rate?" in penstock("translate", theirs, "-o", ours).err
    assert ours.exists()
    ours.unlink()
    said = penstock("translate", theirs, "-o", ours, "--strict")
    assert said.code == 2
    assert not ours.exists()
    assert penstock("check", theirs).code == 2


def test_doubtful_values_are_told_and_refused_if_asked(tmp_path: Path) -> None:
    theirs = written(tmp_path, THEIRS.replace("compute_type: bf16", "compute_type: fp8"))
    said = penstock("translate", theirs, "--json", "--world-size", 1)
    assert said.code == 0
    assert (said.last["has_doubtful"], said.last["counts"]["doubtful"]) == (True, 1)
    by_key = {line["key"]: line for line in said.last["keys"]}
    assert by_key["compute_type"]["class"] == "doubtful"
    assert "experts" in by_key["compute_type"]["why"]
    assert penstock("translate", theirs, "--strict", "--world-size", 1).code == 2
    assert not penstock("translate", written(tmp_path), "--json").last["has_doubtful"]


def test_nothing_is_written_of_what_can_be_no_run(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    for change, told in {
        "stage: RM": "stage: recipes for",
        "stage: SFT\nmax_grad_norm: -.inf\nlogging_steps: 0": "logging_steps (here train.log_in",
    }.items():
        said = penstock("translate", written(tmp_path, THEIRS.replace("stage: SFT", change)),
                        "-o", ours)  # fmt: skip
        assert said.code == 2
        assert told in said.err
        assert not ours.exists()


def test_a_file_of_ours_stays_what_it_is(tmp_path: Path) -> None:
    native = tmp_path / "run.yaml"
    text = penstock("translate", written(tmp_path), "--world-size", 1).out
    native.write_text(f"{text}\npush:\n")
    again = penstock("translate", native, "-o", tmp_path / "again.yaml")
    assert again.code == 0
    assert load(tmp_path / "again.yaml") == load(native)


def test_a_dialect_can_be_named(tmp_path: Path) -> None:
    theirs = written(tmp_path, "model_name_or_path: x\noutput_dir: out\n")
    assert penstock("translate", theirs).code == 2
    said = penstock("translate", theirs, "--dialect", "erniekit", "--json")
    assert said.last["config"]["model"]["model_path"] == "x"
    assert "is not a dialect" in penstock("translate", theirs, "--dialect", "erniekid").err


def test_check_says_that_a_file_is_foreign_and_reads_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"src": ["What is 1 + 1?"], "tgt": ["2"]}\n')
    said = penstock("check", written(tmp_path), "--train.lr", "3e-5")
    assert said.code == 0, said.err
    assert "is written for ERNIEKit: " in said.err
    assert yaml.safe_load(said.out)["train"]["lr"] == 3e-5


def test_what_is_secret_is_not_repeated(tmp_path: Path) -> None:
    theirs = written(tmp_path, f"{THEIRS}hub_token: hf_abcdefghijklmnop\n")
    said = penstock("translate", theirs, "-o", tmp_path / "ours.yaml")
    assert "hub_token: (secret)" in said.err
    told = said.out + said.err + (tmp_path / "translation_report.json").read_text()
    assert "abcdefgh" not in told
