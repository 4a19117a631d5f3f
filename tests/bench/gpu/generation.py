"""Tokens a second that a model generates, ours beside transformers': `python -m
tests.bench.gpu.generation [--dry]`.

A random Qwen3 of 1.7 billion parameters in bf16; greedy and sampled, one prompt and many, many
completions of one prompt. Transformers pads uneven prompts on the left; both write as many tokens.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.engine.distributed.ranks import destroy_process_group
from tests.bench import peers
from tests.bench.bench_generation import MODEL, Case, ours, theirs
from tests.bench.figures import record
from tests.bench.timing import DEVICE, Work, machine, medians, verdict
from tests.bench.train_cuda import QWEN3_1_7B
from tests.engine import runs
from tests.engine.generation.writing import built_of, job_of

OF_PEER = 1.0
LENGTHS = (200, 30, 120, 7, 65, 150, 90, 12)
CASES = {
    "32 prompts, greedy": Case(LENGTHS * 4, 1, 32, 0),
    "32 prompts, sampled": Case(LENGTHS * 4, 1, 32, 1),
    "1 prompt, sampled": Case((120,), 1, 32, 1),
    "1 prompt, 64 completions, sampled": Case((400,), 64, 32, 1),
}
SHORT = {"32 prompts, greedy": Case((9, 4), 1, 3, 0), "1 prompt, sampled": Case((5,), 2, 3, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    print(machine())
    # Prompts are drawn from the vocabulary of the bench on CPUs.
    shape: dict[str, Any] = {**(runs.TINY if dry else {**runs.TINY, **QWEN3_1_7B})}
    shape |= {"vocab_size": MODEL["vocab_size"], "max_position_embeddings": 2048}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = transformers.AutoConfig.for_model(**shape)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / "model")
        settings = {"precision": "bf16"}
        built = built_of(job_of(folder, "run", **settings))
        for name, case in (SHORT if dry else CASES).items():
            tokens = len(case.lengths) * case.answers * case.new
            works: dict[str, Work] = {"ours": partial(ours, built.generator, case)}
            peer: Work = partial(theirs, model, case)
            if peers.result_of("transformers", peer) is not None:
                works["transformers"] = peer
            rates = {who: tokens / spent for who, spent in medians(works, wall_clock).items()}
            for who, rate in rates.items():
                record(f"{name}, {who}", rate, "tokens/s")
            shown = ", ".join(f"{who} {rate:,.0f} tokens/s" for who, rate in rates.items())
            print(f"{name:36} {shown}", flush=True)
            if "transformers" in rates:
                ratio = rates["ours"] / rates["transformers"]
                print(verdict(f"{name}: ours / transformers", ratio, OF_PEER))
    destroy_process_group()


def wall_clock(work: Work) -> float:
    """Seconds of one run: tokens come back to the host, so nothing is still under way."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
