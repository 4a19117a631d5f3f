"""Files of other tools, with data in their own form, train here as they are: only what is large
or lies elsewhere is written otherwise, under their own names."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml

from penstock.config.loading import yaml12
from penstock.train.metrics.jsonl import read_metrics
from tests.pipeline.runs import outcome, penstock
from tests.stages.prepare.megatron_files import write_mapped

STEPS = 10
LENGTH = 8192
"""As the files say: sample documents are long in bytes."""

OF_ERNIEKIT = {
    "ERNIE-4.5-0.3B__sft__run_sft_8k": "sft-eval.jsonl",
    "ERNIE-4.5-0.3B__sft__run_sft_lora_8k": "sft-eval.jsonl",
    "ERNIE-4.5-0.3B__dpo__run_dpo_8k": "dpo-eval.records-2-and-7.jsonl",
    "ERNIE-4.5-0.3B__dpo__run_dpo_lora_8k": "dpo-eval.records-2-and-7.jsonl",
}
OF_NXDT = (
    "hf_llama3_8B_config",
    "hf_llama3_8B_SFT_config",
    "hf_llama3_8B_DPO_config",
    "megatron_llama_7B_config",
)


def trained(folder: Path, values: dict[str, Any]) -> list[float]:
    """The losses of the steps of a run of this file."""
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(values))
    ours = {
        "pipeline.artifacts_path": folder / "artifacts",
        "data.dataset_prepared_path": folder / "prepared",
        "launch.nproc_per_node": 1,
    }
    words = [word for name, value in ours.items() for word in (f"--{name}", value)]
    done = outcome(penstock("train", file, *words, "--json"))
    records = read_metrics(Path(done["stages"][-1]["path"]) / "metrics.jsonl")
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "records"), OF_ERNIEKIT.items())
def test_files_of_erniekit_train(name, records, model, shared, tmp_path):
    examples = shared / "examples"
    values = yaml12.parse((examples / "erniekit" / f"{name}.yaml").read_text()).value
    data = str(examples / "erniekit_data" / records)
    values |= {
        "model_name_or_path": str(model),
        "train_dataset_path": data,
        "eval_dataset_path": data,
        "output_dir": str(tmp_path / "out"),
        "logging_dir": str(tmp_path / "logs"),
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
    }
    losses = trained(tmp_path, values)
    assert len(losses) == STEPS
    assert torch.tensor(losses).isfinite().all()


def put(values: dict[str, Any], keys: dict[str, Any]) -> None:
    """Values under dotted keys."""
    for key, value in keys.items():
        *above, last = key.split(".")
        at = values
        for name in above:
            at = at[name]
        at[last] = value


def data_of_nxdt(folder: Path, name: str) -> dict[str, Any]:
    """Data in the form that a file of this name takes, and where they lie."""
    sums = [(f"{i} + {i} =", str(2 * i)) for i in range(64)]
    if "SFT" in name or "DPO" in name:
        file = folder / "data.jsonl"
        with file.open("w") as stream:
            for question, answer in sums:
                pair = {"input": question, "output": answer}
                if "DPO" in name:
                    pair = {"prompt": question, "chosen": answer, "rejected": "I do not know"}
                stream.write(json.dumps(pair) + "\n")
        held_out = {"data.val_dir": str(file)} if "SFT" in name else {}
        return {"data.train_dir": str(file), **held_out}
    tokens = list(range(3, 259))
    if "megatron" in name:
        prefix = write_mapped(folder / "book_text_document", [[tokens]] * 400)
        return {"data.data_prefix": [1.0, str(prefix)]}
    rows = [{"input_ids": tokens, "labels": tokens, "attention_mask": [1] * 256}] * 64
    datasets.Dataset.from_list(rows).save_to_disk(folder / "data")
    return {"data.train_dir": str(folder / "data")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OF_NXDT)
def test_files_of_nxdt_train(name, model, shared, tmp_path):
    values = yaml12.parse((shared / "examples" / "nxdt" / f"{name}.yaml").read_text()).value
    theirs = {
        "trainer.max_steps": STEPS,
        "trainer.log_every_n_steps": 1,
        "exp_manager.exp_dir": str(tmp_path / "out"),
        "exp_manager.resume_from_checkpoint": str(model) if "FT" in name or "DPO" in name else None,
        "data.global_batch_size": 4,
        "model.encoder_seq_length": 256,
        "model.num_layers": 2,
        "model.hidden_size": 32,
        **data_of_nxdt(tmp_path, name),
    }
    if "megatron" in name:
        theirs |= {"model.ffn_hidden_size": 48, "model.num_attention_heads": 2}
        theirs |= {"model.num_kv_heads": 2, "data.tokenizer.type": str(model)}
    else:
        theirs["model.model_config"] = str(model / "config.json")
    if "tokenizer" in values["data"]:
        theirs["data.tokenizer.type"] = str(model)
    if "seq_length" in values["data"] and "megatron" not in name:
        theirs["data.seq_length"] = 256
    if "DPO" in name:
        theirs["model_alignment_strategy.dpo.max_prompt_length"] = 128
    put(values, theirs)
    losses = trained(tmp_path, values)
    assert len(losses) == STEPS
    assert torch.tensor(losses).isfinite().all()
