"""Words of the command line that are none: told with the word, and what was probably meant."""

from pathlib import Path

import pytest

from tests.cli.mistakes.table import Mistake, make_and_judge

WORDS = {
    "run run.yaml --lora 1": r"no option --lora; lora is a section: .* such as --lora\.",
    "run run.yaml --model x": r"no option --model; model is a section",
    "run run.yaml --train": "no option --train; train is a section",
    "run run.yaml --train. 5": "train is a section",
    "run run.yaml --lr 1": r"did you mean --train\.lr\?",
    "run run.yaml --epochs 1": r"did you mean --train\.num_train_epochs\?",
    "run run.yaml --output-dir o": r"did you mean --train\.output_dir\?",
    "run run.yaml --batch-size 1": r"did you mean --train\.micro_batch_size\?",
    "run run.yaml --lora_rank 1": r"did you mean --lora\.lora_rank\?",
    "run run.yaml --bf16": r"did you mean --train\.precision\?",
    "run run.yaml --dataset x": r"did you mean --data\.datasets\?",
    "run run.yaml --verbose": "penstock run has no option --verbose",
    "run run.yaml -v": "penstock run has no option -v",
    "run run.yaml --dry-run=yes": "--dry-run' does not take a value",
    "run run.yaml --.lr 5": r"no option --\.lr",
    "run run.yaml --train..lr 5": r"no option --train\.\.lr",
    "run run.yaml --train.lr.x 5": r"--train\.lr\.x: train\.lr: is a mapping; wanted a number",
    "run run.yaml --data.datasets.x.path y": "name an entry by its number",
    "run run.yaml --data.datasets.0 y": r"--data\.datasets\.0: is the text y; wanted a mapping",
    "run run.yaml --train.optimizer_kwargs {": r"optimizer_kwargs: '\{' is not a YAML value",
    "run run.yaml --pipeline.stages [prepare": r"'\[prepare' is not a YAML value",
    "run run.yaml --pipeline.stages prepare,train": "is the text prepare,train; wanted a list",
    "run run.yaml run": "unexpected extra argument",
    "run train run.yaml": "unexpected extra argument",
    "tune": "No such command 'tune'",
    "help": "No such command 'help'",
    "--run run.yaml": "penstock has no option --run",
    "-c run.yaml": "penstock has no option -c; give the file without an option",
    "models nope": "No such command 'nope'",
    "artifacts show": "Missing argument 'key'",
    "artifacts list nope": "unexpected extra argument",
    "artifacts prune --keep -1": "has no option --keep",
    "releases list nope": r"nope does not exist; did you mean run\.yaml\?",
    "data stats nope.yaml": r"nope\.yaml does not exist; did you mean run\.yaml\?",
    "translate rows.jsonl": r"rows\.jsonl is data, and a config is YAML",
    "eval rows.jsonl": r"rows\.jsonl is data, and a config is YAML",
    "report /": "/ contains no training run",
    "chat rows.jsonl": r"rows\.jsonl is a file, not a folder",
    "chat /": "/ holds neither a run nor a model",
    "chat /dev/null": "/dev/null is not a local folder",
    "chat run.yaml --temperature hot": "Invalid value for '--temperature'",
    "chat run.yaml --max-new-tokens -1": "--max-new-tokens is -1",
    "chat ~nobodyxyz/x": "~nobodyxyz is no user of this machine",
    "merge ~nobodyxyz/x a -o o": "~nobodyxyz is no user of this machine",
    "merge rows.jsonl rows.jsonl -o o": r"rows\.jsonl is a file, not a folder",
    "serve rows.jsonl": r"rows\.jsonl is data, and a config is YAML",
    "serve nope.yaml": r"nope\.yaml does not exist; did you mean run\.yaml\?",
    "launch run.yaml --gpus -1": "Invalid value for '--gpus'",
    "plan run.yaml --devices x": "Invalid value for '--devices'",
    "push run.yaml": "push has nowhere to go",
    "prepare run.yaml --shard 0/0": "--shard is '0/0', which is no share",
    "prepare run.yaml --shard -1/2": "--shard is '-1/2', which is no share",
    "flow nope.yaml": r"nope\.yaml does not exist; did you mean run\.yaml\?",
    "recur nope.yaml": r"nope\.yaml does not exist; did you mean run\.yaml\?",
    "run run.yaml --train.lr 1e-5 --train.lr=2e-5": "train.lr is given twice, as 1e-5 and as 2e-5",
    "run run.yaml --from pack --from train": "--from is given twice, as pack and as train",
    "merge a b -o c --out d": "--out is given twice, as c and as d",
    "run run.yaml \u2014dry-run": r"begins with a dash that is no hyphen",
    "run run.yaml \u2013train.lr 5": r"begins with a dash that is no hyphen",
    "init recipe-x": "no recipe has the name recipe-x",
}


@pytest.mark.parametrize("command", WORDS)
def test_a_word_that_is_none_is_told(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_and_judge(Mistake(WORDS[command], command), tmp_path)
