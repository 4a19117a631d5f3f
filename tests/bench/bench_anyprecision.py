"""What keeping an optimizer's states and weights in bfloat16 does to what is learnt from GSM8K:
`python -m tests.bench.bench_anyprecision [--data train.jsonl] [--steps N]`.

A small Qwen3 learns the same rows in the same order, from the same weights, with AdamW whose
states are kept in float32 and in other ways. Told are the mean loss of the last tenth of the steps
and how far it is from that of float32; how far the weights' change is from the change in float32,
as a share of it; beside both, what another order of the rows does, which is no error at all; and
bytes of weights and states for each weight. The arithmetic is a CPU's; a GPU's rounds alike.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from penstock.engine.distributed.param_shards import local
from penstock.rows.tokenizer import byte_tokenizer
from tests.bench.data.packed import write_ids
from tests.engine import loops, runs

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"
LENGTH = 512
ROUNDED: dict[str, Any] = {"optimizer": "anyprecision_adamw"}
BF16: dict[str, Any] = {"precision": "bf16"}
AT_RANDOM: dict[str, Any] = {"stochastic_rounding": True}
KAHAN: dict[str, Any] = {"optimizer_kwargs": {"use_kahan_summation": True}}
WAYS: dict[str, dict[str, Any]] = {
    "all in float32": {},
    "other rows first": {"seed": 8},
    "states in bf16": ROUNDED,
    "states in bf16, at random": {**ROUNDED, **AT_RANDOM},
    "weights in bf16": BF16,
    "weights in bf16, at random": {**BF16, **AT_RANDOM},
    "both in bf16": {**BF16, **ROUNDED},
    "both in bf16, at random": {**BF16, **ROUNDED, **AT_RANDOM},
    "both in bf16, with what is lost": {**BF16, **ROUNDED, **KAHAN},
}


def rows_of(path: Path, count: int) -> list[list[int]]:
    """Token ids of questions with their answers, in rows of one length."""
    tokenizer, found, row = byte_tokenizer(), list[list[int]](), list[int]()
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            row += tokenizer(f"{record['question']}\n{record['answer']}\n")["input_ids"]
            while len(row) >= LENGTH and len(found) < count:
                found.append(row[:LENGTH])
                row = row[LENGTH:]
            if len(found) == count:
                return found
    return found


def learnt(folder: Path, name: str, train: dict[str, Any], steps: int) -> dict[str, Any]:
    """The losses of a run, what its weights have changed by, and bytes for each weight."""
    settings = {"max_steps": steps, "lr": 3e-3, "lr_warmup_steps": steps // 10, **train}
    config = runs.run_config(
        folder / name.replace(" ", "_"),
        folder / "model",
        model={"model_path": str(folder / "model")},
        data_parallel_mode="none",
        lr_decay_style="cosine",
        **settings,
    )
    loop = loops.loop_of(runs.job_of(config, folder / "packed"))
    before = loops.parameters_of(loop)
    losses = [loops.step(loop)["loss"] for _ in range(steps)]
    after = loops.parameters_of(loop)
    optimizer = loop.built.engine.optimizer
    weights = [local(one.parameter) for one in loop.built.engine.model.params]
    states = [s for its in optimizer.state.values() for s in its.values() if s.dim()]
    loop.close()
    return {
        "losses": losses,
        "change": np.concatenate([(after[n] - before[n]).ravel() for n in sorted(before)]),
        "bytes": sum(t.nbytes for t in [*weights, *states]) / sum(t.numel() for t in weights),
    }


def main() -> None:
    """Measure every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=GSM8K)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    if not asked.data.is_file():
        raise SystemExit(f"{asked.data} is missing; name GSM8K's train.jsonl with --data")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_ids(folder / "packed", rows_of(asked.data, 4 * asked.steps))
        shape = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
        start = transformers.Qwen3Config(**{**runs.TINY, **shape, "dtype": "float32"})
        transformers.Qwen3ForCausalLM(start).save_pretrained(folder / "model")
        found = {name: learnt(folder, name, train, asked.steps) for name, train in WAYS.items()}
    exact = found["all in float32"]
    last = max(1, asked.steps // 10)
    print(f"{asked.steps} steps of 4 rows of {LENGTH} tokens; loss of the last {last}")
    print(f"{'':34} {'loss':>8} {'apart':>9} {'change apart':>13} {'bytes':>6}")
    for name, one in found.items():
        loss, want = (float(np.mean(each["losses"][-last:])) for each in (one, exact))
        apart = np.linalg.norm(one["change"] - exact["change"]) / np.linalg.norm(exact["change"])
        print(f"{name:34} {loss:8.4f} {loss - want:+9.4f} {apart:13.3f} {one['bytes']:6.1f}")


if __name__ == "__main__":
    main()
