"""Reinforcement learning through the training server: `python -m tests.bench.gpu.server [--dry]`.

A server over a random Qwen3 of 0.6 billion parameters and a client with the SDK, as its users write
it: sample completions of a group of prompts, `forward_backward` with importance sampling,
`optim_step`, weights to the sampler, and again. Printed are seconds of a round and of its parts.
"""

import argparse
import statistics
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.rows.tokenizer import byte_tokenizer
from tests.bench.figures import record
from tests.bench.timing import machine
from tests.bench.train_cuda import QWEN3_0_6B
from tests.engine import runs
from tests.server.serving import VOCABULARY, Server

PROMPTS, COMPLETIONS, NEW, PROMPT = 16, 8, 64, 128
ROUNDS = 3
"""The first of which is not counted."""

FIELDS = {"enable_mixed_precision": True, "attn_implementation": None, "ce_mode": "chunked"}
"""As a user's server has them by default; tests ask for others."""

PARTS = ("sample", "train", "sync")


def write_model(folder: Path, *, dry: bool) -> Path:
    shape = {**runs.TINY, "vocab_size": VOCABULARY, "max_position_embeddings": 2048}
    if not dry:
        shape |= QWEN3_0_6B
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**shape)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def round_of(client: Any, sampler: Any, types: Any, sizes: tuple[int, int, int, int]) -> Any:
    """Sample, learn, and hand the weights to the sampler; returns the sampler and seconds."""
    prompts, completions, new, length = sizes
    clock = [time.perf_counter()]
    how = types.SamplingParams(max_tokens=new, temperature=1.0, stop=[])
    asked = [[(7 * one + at) % 200 + 1 for at in range(length)] for one in range(prompts)]
    handed = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(ids), num_samples=completions, sampling_params=how
        )
        for ids in asked
    ]
    drawn = [one.result() for one in handed]
    clock.append(time.perf_counter())
    data = []
    for ids, answer in zip(asked, drawn, strict=True):
        for sequence in answer.sequences:
            tokens, before = [*ids, *sequence.tokens], len(ids) - 1
            advantages = [1.0 if token % 2 else -1.0 for token in sequence.tokens]
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": [0.0] * before + list(sequence.logprobs),
                "advantages": [0.0] * before + advantages,
            }
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
                )
            )
    passed = client.forward_backward(data, "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=1e-5)).result()
    passed.result()
    clock.append(time.perf_counter())
    sampler = client.save_weights_and_get_sampling_client("now").result()
    clock.append(time.perf_counter())
    return sampler, [after - before for before, after in pairwise(clock)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    print(machine())
    if not find_spec("tinker"):
        print("not measured: the server (pip install tinker)")
        return
    tinker, types = import_module("tinker"), import_module("tinker.types")
    sizes = (2, 2, 4, 8) if dry else (PROMPTS, COMPLETIONS, NEW, PROMPT)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = write_model(folder / "model", dry=dry)
        server = Server(folder / "server", model, **FIELDS)
        try:
            server.start(180)
            service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
            client = service.create_lora_training_client(str(model), rank=16, seed=1).result()
            sampler = client.save_weights_and_get_sampling_client("start").result()
            found = []
            for _ in range(2 if dry else ROUNDS):
                sampler, spent = round_of(client, sampler, types, sizes)
                found.append(spent)
        finally:
            server.stop()
    medians = [statistics.median(each) for each in zip(*found[1:], strict=True)]
    prompts, completions, new, length = sizes
    for name, seconds in zip(PARTS, medians, strict=True):
        record(f"round of {prompts * completions} samples: {name}", seconds, "s")
        print(f"{name:8} {seconds:8.3f} s")
    sampled, trained = prompts * completions * new, prompts * completions * (new + length)
    record("sampling through the server", sampled / medians[0], "tokens/s")
    record("training through the server", trained / medians[1], "tokens/s")
    print(f"sampled {sampled / medians[0]:,.0f}, trained {trained / medians[1]:,.0f} tokens/s")


if __name__ == "__main__":
    main()
