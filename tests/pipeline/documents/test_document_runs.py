"""Examples as documents print them train here for some steps, with a tiny model and little data."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

from penstock.config.translate.translation import put_at
from penstock.train.metrics.jsonl import read_metrics
from tests.config.dialects import document_examples as said
from tests.config.dialects.test_document_examples import nxdt_values, words_of
from tests.pipeline.runs import penstock
from tests.stages.prepare.megatron_files import write_mapped
from tests.turns import one_day_in

pytestmark = pytest.mark.slow

STEPS = 3


def losses_in(folder):
    [file] = folder.rglob("metrics.jsonl")
    losses = [record["loss"] for record in read_metrics(file) if "loss" in record]
    assert len(losses) == STEPS
    assert torch.tensor(losses).isfinite().all()
    return losses


def words(**settings):
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def here(folder):
    return {
        "data.dataset_prepared_path": folder / "prepared",
        "pipeline.artifacts_path": folder / "artifacts",
        "train.max_steps": STEPS,
    }


@one_day_in(2, of=0)
def test_the_whole_run_of_local_training_trains_by_the_printed_command(model, tmp_path):
    (tmp_path / "config.yaml").write_text(said.LOCAL["a whole run"])
    rows = [{"input_ids": [n % 250, 1, 2, 3], "labels": [-100, 1, 2, 3]} for n in range(64)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # What the hub and a GPU have stands here in overrides, after the arguments as printed.
    ours = {
        **here(tmp_path),
        "model.model_path": model,
        "model.attn_implementation": "eager",
        "data.datasets.0.path": data,
        "data.sample_packing_sequence_len": 16,
        "data.datasets.0.max_seq_len": 16,
        "data.pad_to_multiple_of": 16,
        "train.output_dir": tmp_path / "out",
    }
    command = said.TRAIN_COMMANDS[0].replace("--nproc_per_node=8", "--nproc_per_node=2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = subprocess.run(
        [
            *torchrun,
            *("-m", "penstock.cli.train", *words_of(command, "xorl.cli.train"), "--train.lr"),
            *("2e-5", *words(**ours)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses_in(tmp_path / "out")


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["SFT", "DPO"])
def test_a_file_in_the_documented_words_of_erniekit_trains(stage, model, tmp_path):
    records, keys = [], {}
    for n in (*range(20), *range(20)):
        record = {"src": [f"{n} + {n}?"], "tgt": [str(2 * n)]}
        if stage == "DPO":
            record |= {"tgt": [], "response": [[str(n + 1)], [str(2 * n)]], "sort": [0, 1]}
            keys = {"beta": 0.1, "max_prompt_len": 64}
        records.append(record)
    data = tmp_path / "data.jsonl"
    # Every record twice, as data of preferences often have it.
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = said.ERNIEKIT_REQUIRED | keys | {"max_steps": STEPS, "max_seq_len": 256}
    values |= {"model_name_or_path": str(model), "train_dataset_path": str(data)}
    values |= {"output_dir": str(tmp_path / "out"), "save_steps": 0, "save_strategy": "no"}
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(values))
    penstock("train", file, *words(**here(tmp_path), **{"launch.nproc_per_node": 1}))
    losses_in(tmp_path / "out")


@pytest.mark.exhaustive
def test_the_printed_megatron_run_of_nxdt_trains_on_indexed_documents(model, tmp_path):
    documents = [[[(n + i) % 256 for i in range(5 + n % 40)] + [256]] for n in range(120)]
    prefix = write_mapped(tmp_path / "book_text_document", documents, 8)
    values = nxdt_values(said.NXDT_MEGATRON_MODEL, {"data.seq_length": 64})
    for key, value in {
        "trainer.devices": 1,
        "trainer.max_steps": STEPS,
        "trainer.val_check_interval": STEPS,
        "exp_manager.exp_dir": str(tmp_path / "out"),
        "distributed_strategy.tensor_model_parallel_size": 1,
        "data.global_batch_size": 4,
        "data.data_prefix": [1.0, str(prefix)],
        "data.splits_string": "900,100,0",
        "data.tokenizer.type": str(model),
        "model.encoder_seq_length": 64,
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.ffn_hidden_size": 48,
        "model.num_attention_heads": 2,
        "model.num_kv_heads": 2,
    }.items():
        put_at(values, key, value)
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(values))
    penstock("train", file, *words(**here(tmp_path)))
    losses_in(tmp_path / "out")
    packed = next((tmp_path / "prepared" / "pack").glob("*/manifest.json"))
    facts = json.loads(packed.read_text())["facts"]
    assert facts["tokens"]["train"] == sum(len(document[0]) for document in documents[:108])
    assert facts["tokens"]["validation"] == sum(len(document[0]) for document in documents[108:])
    assert facts["fill"]["train"] > 0.98
