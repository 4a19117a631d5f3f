"""Tokens per CPU second that a model writes: `python -m tests.bench.bench_generation`.

Ours beside transformers' own `generate` with its cache, in turn on one thread: a Qwen3 of eight
layers with a real vocabulary's size, and the same prompts of uneven lengths, which transformers
pads on the left. Both write the same number of tokens, drawn at temperature 1 or the likeliest; of
the likeliest the tokens are compared. The last rows are of one prompt alone, and of many answers to
one prompt; and of a few prompts as they are answered while a model is trained, with keys and values
kept, and with every token computed anew in each pass.
"""

import contextlib
import os
import platform
import sys
import tempfile
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
}
ON_THE_WAY = Case((40, 25, 60, 33), 1, 64, 0)


def prompts_of(case: Case) -> list[list[int]]:
    """Random tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, MODEL["vocab_size"], size=size).tolist() for size in case.lengths]


def ours(generator: Generator, case: Case) -> list[list[int]]:
    """The answers, one after another."""
    how = SamplingParams(max_tokens=case.new, temperature=case.temperature, seed=0)
    prompts = [Prompt(ids, how, num_completions=case.answers) for ids in prompts_of(case)]
    return [one.tokens for each in generator.generate(prompts) for one in each.completions]


@torch.no_grad()
def theirs(model: Any, case: Case) -> list[list[int]]:
    """Those of transformers."""
    prompts = prompts_of(case)
    width = max(map(len, prompts))
    device = model.device
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    draws = {"do_sample": True, "temperature": case.temperature, "top_k": 0}
    given = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=case.new,
        min_new_tokens=case.new,
        num_return_sequences=case.answers,
        pad_token_id=0,
        eos_token_id=None,
        **(draws if case.temperature else {"do_sample": False}),
    )
    return given[:, width:].tolist()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(sys.stderr):
        folder = Path(place)
        write_model(folder / "model", **MODEL)
        generator = built_of(job_of(folder, "run")).generator
        model = read_model(folder / "model")
        lines = [f"{'tokens per CPU second':30} {'penstock':>8} {'transformers':>12} {'ratio':>6}"]
        for name, case in CASES.items():
            if not case.temperature and ours(generator, case) != theirs(model, case):
                sys.exit(f"{name}: the two write other tokens")
            works = {"ours": partial(ours, generator, case), "theirs": partial(theirs, model, case)}
            tokens = len(case.lengths) * case.answers * case.new
            mine, other = (tokens / spent for spent in medians(works, processor_seconds).values())
            lines.append(f"{name:30} {mine:8.0f} {other:12.0f} {mine / other:6.2f}")
            sys.stderr.write(lines[-1] + "\n")
        anew = replace(generator, max_cached_length=0)
        if ours(generator, ON_THE_WAY) != ours(anew, ON_THE_WAY):
            sys.exit("what is kept changes what is written")
        works = {
            name: partial(ours, each, ON_THE_WAY) for name, each in (("k", generator), ("a", anew))
        }
        tokens = len(ON_THE_WAY.lengths) * ON_THE_WAY.new
        kept, again = (tokens / spent for spent in medians(works, processor_seconds).values())
        lines += ["", f"{'4 prompts, greedy':30} {'KV cache':>8} {'no cache':>12} {'ratio':>6}"]
        lines.append(f"{'':30} {kept:8.0f} {again:12.0f} {kept / again:6.2f}")
    print("\n".join(lines))
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


if __name__ == "__main__":
    main()
