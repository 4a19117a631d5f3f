"""A few hundred short chats and LoRA with default settings, beside a loop of transformers and PEFT:
`python -m tests.bench.bench_small_lora MODEL [--chats 300] [--rounds 2]`.

MODEL is a folder with a chat template. Both train one epoch of the same chats, in turns, each in a
process of its own: Penstock in its own row length and layout; the loop with padded batches of 8, as
PEFT's examples write it, in each dtype. Seconds are those of the steps alone; tokens do not count
padding.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 8
DTYPES = ("bfloat16", "float32")
GOAL_SECONDS = 150
"""Of one epoch of 300 chats on two cores."""
THINGS = ("bread", "bike", "printer", "cat", "garden", "coffee")
STATES = ("odd", "slow", "gone", "loud", "old")
VERBS = ("check", "tie", "follow", "trust", "mend")


def chats(count: int) -> list[list[dict[str, str]]]:
    """About 72 tokens each, with a system message of SmolLM2's template."""
    advice = [f"{verb} the {thing}" for verb, thing in product(VERBS, ("rope", "tide"))]
    return [
        [
            {"role": "user", "content": f"Please help me: my {thing} is {state}. What now?"},
            {
                "role": "assistant",
                "content": f"Ahoy! Captain Brine here. So my {thing} is {state}? Then {words}.",
            },
        ]
        for (thing, state), words in product(product(THINGS, STATES), advice)
    ][:count]


def train_with_peft(model: str, data: Path, dtype: str) -> dict[str, float]:
    """Tokens and seconds of one epoch of the plain loop."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(base, config).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)
    tokens, started = 0, time.perf_counter()
    for first in range(0, len(texts), BATCH):
        batch = tokenizer(texts[first : first + BATCH], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        adapted(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int(batch["attention_mask"].sum())
    return {"tokens": tokens, "seconds": time.perf_counter() - started}


def train_with_penstock(model: str, data: Path, folder: Path) -> dict[str, float]:
    """The same of `penstock train`; rounds share prepared and packed data."""
    config = folder / "run.yaml"
    sections = {
        "model": {"model_path": model},
        "data": {"datasets": [{"path": str(data)}], "dataset_prepared_path": str(folder / "data")},
        "train": {"output_dir": str(folder / "out"), "lr": 2e-4},
        "lora": {"enable_lora": True},
        "pipeline": {"artifacts_path": str(folder / "artifacts")},
    }
    config.write_text(yaml.safe_dump(sections))
    penstock = str(Path(sys.executable).with_name("penstock"))
    command = (penstock, "train", str(config), "--force", "train")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    steps = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return {name: sum(step[name] for step in steps) for name in ("tokens", "seconds")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peft", nargs=2, metavar=("DATA", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peft:
        print(json.dumps(train_with_peft(args.model, Path(args.peft[0]), args.peft[1])))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ("Penstock", *DTYPES)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "chats.jsonl"
        lines = (json.dumps({"messages": messages}) for messages in chats(args.chats))
        data.write_text("\n".join(lines) + "\n")
        loop = (sys.executable, "-m", "tests.bench.bench_small_lora", args.model, "--peft", data)
        for _ in range(args.rounds):
            results["Penstock"].append(train_with_penstock(args.model, data, folder))
            for dtype in DTYPES:
                done = subprocess.run((*loop, dtype), check=True, capture_output=True, text=True)
                results[dtype].append(json.loads(done.stdout.splitlines()[-1]))
    for name, rounds in results.items():
        seconds = statistics.median(result["seconds"] for result in rounds)
        rates = [result["tokens"] / result["seconds"] for result in rounds]
        every = ", ".join(f"{rate:.0f}" for rate in rates)
        print(
            f"{name:16} {seconds:6.1f} s of steps (goal {GOAL_SECONDS}), "
            f"{statistics.median(rates):6.1f} tokens/s ({every}), "
            f"{rounds[0]['tokens']:,.0f} tokens"
        )


if __name__ == "__main__":
    main()
