"""Tokens generated per CPU second: `python -m tests.bench.bench_generation [MODEL [bf16]]`.

Ours beside transformers' `generate` with its cache, in turn on one thread: a Qwen3 of eight layers
with a real vocabulary's size, or the model of a folder, and the same prompts of uneven lengths,
which transformers pads on the left. Both generate the same number of tokens, sampled at temperature
1 or greedily; in fp32 greedy tokens are compared. Further rows: one prompt alone, many completions
of one prompt, and a few prompts with and without the KV cache.
"""

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.engine.generation.generator import Generator
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from tests.bench.pages import write_section
from tests.bench.timing import ROUNDS, medians, processor_seconds
from tests.engine.generation.writing import built_of, job_of, read_model, write_model

TITLE = "Generation"
MODEL = {
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}


class Case(NamedTuple):
    """What is asked."""

    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    answers: int
    """Answers to each."""
    new: int
    temperature: float


CASES = {
    "16 prompts, greedy": Case((200, 30, 120, 7, 65, 150, 90, 12) * 2, 1, 64, 0),
    "16 prompts, sampled": Case((200, 30, 120, 7, 65, 150, 90, 12) * 2, 1, 64, 1),
    "1 prompt, sampled": Case((120,), 1, 64, 1),
    "1 prompt, 32 completions, sampled": Case((400,), 32, 64, 1),
    "1 prompt of 512, 8 completions": Case((512,), 8, 64, 1),
}
FEW_PROMPTS = Case((40, 25, 60, 33), 1, 64, 0)


def prompts_of(case: Case) -> list[list[int]]:
    """Random tokens, which both vocabularies have."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, MODEL["vocab_size"], size=size).tolist() for size in case.lengths]


def ours(generator: Generator, case: Case) -> list[list[int]]:
    """The answers, one after another."""
    how = SamplingParams(max_tokens=case.new, temperature=case.temperature, seed=0)
    prompts = [Prompt(ids, how, num_completions=case.answers) for ids in prompts_of(case)]
    outputs = generator.generate(prompts)
    return [completion.tokens for output in outputs for completion in output.completions]


@torch.no_grad()
def theirs(model: Any, case: Case) -> list[list[int]]:
    """Those of transformers."""
    prompts = prompts_of(case)
    width = max(map(len, prompts))
    device = model.device
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    draws = {"do_sample": True, "temperature": case.temperature, "top_k": 0}
    output_ids = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=case.new,
        min_new_tokens=case.new,
        num_return_sequences=case.answers,
        pad_token_id=0,
        eos_token_id=None,
        **(draws if case.temperature else {"do_sample": False}),
    )
    return output_ids[:, width:].tolist()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(sys.stderr):
        folder = Path(temporary)
        if len(sys.argv) > 1:
            (folder / "model").symlink_to(Path(sys.argv[1]).resolve())
        else:
            write_model(folder / "model", **MODEL)
        is_mixed = sys.argv[2:] == ["bf16"]
        generator = built_of(job_of(folder, "run", enable_mixed_precision=is_mixed)).generator
        model = read_model(folder / "model").to(torch.bfloat16 if is_mixed else torch.float32)
        lines = [f"{'tokens per CPU second':34} {'penstock':>8} {'transformers':>12} {'ratio':>6}"]
        for name, case in CASES.items():
            is_compared = not (case.temperature or is_mixed)
            if is_compared and ours(generator, case) != theirs(model, case):
                sys.exit(f"{name}: the tokens differ")
            calls = {"ours": partial(ours, generator, case), "theirs": partial(theirs, model, case)}
            lines.append(row(name, case, calls))
        uncached = replace(generator, max_cached_length=0)
        if not is_mixed and ours(generator, FEW_PROMPTS) != ours(uncached, FEW_PROMPTS):
            sys.exit("the KV cache changes the tokens")
        calls = {
            name: partial(ours, variant, FEW_PROMPTS)
            for name, variant in (("cached", generator), ("uncached", uncached))
        }
        lines += ["", f"{'':34} {'KV cache':>8} {'no cache':>12} {'ratio':>6}"]
        lines.append(row("4 prompts, greedy", FEW_PROMPTS, calls))
    print("\n".join(lines))
    if len(sys.argv) > 1:
        return
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, PyTorch {torch.__version__}."
    write_section(
        "cpu",
        TITLE,
        [
            "Written by `tests/bench/bench_generation.py`.",
            "",
            "Generation by the training engine, and transformers' `generate` of the same "
            f"weights, fp32, one thread, median of {ROUNDS} in turn; a Qwen3 of eight layers, "
            f"256 wide, with {MODEL['vocab_size']:,} tokens. {machine}",
            "",
            *["```", *lines, "```"],
        ],
    )


def row(name: str, case: Case, calls: dict[str, Callable[[], list[list[int]]]]) -> str:
    """A line of the table: tokens per CPU second of two ways, and their ratio."""
    tokens = len(case.lengths) * case.answers * case.new
    first, second = (tokens / spent for spent in medians(calls, processor_seconds).values())
    line = f"{name:34} {first:8.0f} {second:12.0f} {first / second:6.2f}"
    sys.stderr.write(line + "\n")
    return line


if __name__ == "__main__":
    main()
