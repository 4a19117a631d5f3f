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
    said = penstock("translate", theirs, "-o", ours)
    assert said.code == 4
    assert "did you mean learning_rate?" in said.err
    assert "# not translated: learning_rat: 3: is not a known key of ERNIEKit" in ours.read_text()
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


AXOLOTL = """\
base_model: builtin:tiny-qwen3
tokenizer_config: builtin:bytes
adapter: lora
lora_r: 4
neftune_noise_alpha: 5
datasets:
  - path: rows.jsonl
    type: alpaca
    split_thinking: true
  - path: rows.jsonl
    type: own.prompt
micro_batch_size: 3
learning_rate: -1
output_dir: out
"""
GAPS = ["neftune_noise_alpha", "datasets.0.split_thinking", "datasets.1.type", "learning_rate"]


def test_what_is_not_translated_is_a_comment_at_its_place_in_a_file_that_is_a_run(
    tmp_path: Path,
) -> None:
    theirs, ours = written(tmp_path, AXOLOTL), tmp_path / "ours.yaml"
    said = penstock("translate", theirs, "-o", ours, "--world-size", 1, "--json")
    assert said.code == 4
    assert said.last["ok"]
    assert said.last["gaps"] == GAPS
    text = ours.read_text()
    lines = text.splitlines()
    places = [line.split(":")[1].strip() for line in lines if "# not translated: " in line]
    assert sorted(places) == sorted(GAPS)
    rank = next(index for index, line in enumerate(lines) if "lora_rank: 4" in line)
    assert lines[rank + 1].startswith("  # not translated: neftune_noise_alpha: 5: no noise")
    assert "here train.lr: -1, which is -1; it must be at least 0" in text
    assert load(ours).lora.lora_rank == 4
    ours.unlink()
    strict = penstock("translate", theirs, "-o", ours, "--strict")
    assert strict.code == 2
    assert all(f"  {key}: " in strict.err for key in GAPS)
    assert not ours.exists()


def test_a_value_of_the_file_is_not_marked_as_assumed(tmp_path: Path) -> None:
    text = penstock("translate", written(tmp_path, f"{THEIRS}lora_rank: 8\n")).out
    assert "  lora_rank: 8\n" in text
    assert "  lora_alpha: 16  # assumed\n" in text
    both = AXOLOTL.replace("learning_rate: -1", "bf16: true\nwarmup_steps: 10")
    text = penstock("translate", written(tmp_path, both)).out
    [precision] = [line for line in text.splitlines() if "precision:" in line]
    assert precision == "  precision: bf16_mixed"


def test_a_foreign_file_is_checked_with_warnings_of_what_is_left_out(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "What is 1 + 1?", "output": "2"}\n')
    text = AXOLOTL.replace("learning_rate: -1\n", "").replace("    type: own.prompt\n", "")
    theirs = written(tmp_path, text.replace("  - path: rows.jsonl\nmicro", "micro"))
    said = penstock("check", theirs)
    assert said.code == 0, said.err
    assert f"warning: {theirs}:5: neftune_noise_alpha: 5 is left out: no noise" in said.err
    assert f"warning: {theirs}:9: datasets.0.split_thinking: true is left out" in said.err
    for command in ("check", "plan", "run"):
        strict = penstock(command, theirs, "--strict")
        assert strict.code == 2
        assert f"{theirs}:5: neftune_noise_alpha: no noise" in strict.err
    theirs.write_text(AXOLOTL)
    refused = penstock("check", theirs)
    assert refused.code == 2
    assert f"{theirs}:11: datasets.1.type: 'own" in refused.err


def test_files_beside_training_configs_are_named_for_what_they_are(tmp_path: Path) -> None:
    for text, told in {
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n": "accelerate's launch",
        "zero_optimization: {stage: 3}\n": "a DeepSpeed config; write train.zero_stage",
        "model_name_or_path: a\ntemplate: qwen3\ninfer_backend: hf\n": "penstock chat MODEL",
        "model_name_or_path: a\ntemplate: qwen3\nexport_dir: b\n": "penstock merge",
    }.items():
        for command in ("translate", "check"):
            said = penstock(command, written(tmp_path, text))
            assert said.code == 2
            assert told in said.err
    unknown = penstock("translate", written(tmp_path, "shape: round\ncolor: blue\n"))
    assert "is a config of no known tool; its keys are color, shape" in unknown.err


def test_a_file_of_ours_stays_what_it_is(tmp_path: Path) -> None:
    native = tmp_path / "run.yaml"
    text = penstock("translate", written(tmp_path), "--world-size", 1).out
    native.write_text(f"{text}\npush:\n")
    again = penstock("translate", native, "-o", tmp_path / "again.yaml")
    assert again.code == 0
    assert load(tmp_path / "again.yaml") == load(native)


def test_a_dialect_can_be_named(tmp_path: Path) -> None:
    theirs = written(tmp_path, "model_name_or_path: x\noutput_dir: out\n")
    assert "is a config of no known tool" in penstock("translate", theirs).err
    said = penstock("translate", theirs, "--dialect", "erniekit", "--json")
    assert said.last["config"]["model"]["model_path"] == "x"
    assert "is not a dialect" in penstock("translate", theirs, "--dialect", "erniekid").err


def test_check_says_that_a_file_is_foreign_and_reads_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"src": ["What is 1 + 1?"], "tgt": ["2"]}\n')
    said = penstock("check", written(tmp_path), "--train.lr", "3e-5")
    assert said.code == 0, said.err
    assert "is written for ERNIEKit; of its keys: " in said.err
    assert yaml.safe_load(said.out)["train"]["lr"] == 3e-5


def test_what_is_secret_is_not_repeated(tmp_path: Path) -> None:
    theirs = written(tmp_path, f"{THEIRS}hub_token: hf_abcdefghijklmnop\n")
    said = penstock("translate", theirs, "-o", tmp_path / "ours.yaml")
    assert "hub_token: (secret)" in said.err
    told = said.out + said.err + (tmp_path / "translation_report.json").read_text()
    assert "abcdefgh" not in told
