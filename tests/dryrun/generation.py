"""Generation on fake GPUs: a prefill, and decode steps of its sequences."""

import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from penstock.engine.generation.batching import ForwardBatch
from penstock.engine.generation.run import GenerationRun
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import DecodingSequence, Prompt
from penstock.estimate.dryrun.rank import BuiltRank


def generate(rank: BuiltRank) -> None:
    """Generate with every rank's own prompts, and others' as if their replicas ran beside it."""
    check_capacity(rank)
    # Fake tensors have no values: what would be read of them is what a real run reads.
    sampled: list[DecodingSequence] = []
    forward = GenerationRun._forward

    def remember_sampled(run: GenerationRun, batch: ForwardBatch, samples: torch.Tensor) -> None:
        sampled[:] = [seq for sequences in batch.after for seq in sequences]
        # All that this replica has: its prompts fit one pass.
        local.update(sampled)
        passes.append(batch.batch.num_tokens)
        forward(run, batch, samples)

    def append_tokens(run: GenerationRun, samples: torch.Tensor) -> bool:
        assert samples.device.type == "cuda"
        for seq in run._unfinished:
            if seq in sampled or seq not in local:
                seq.append(0, 0.0, None)
        return False

    passes: list[int] = []
    local: set[DecodingSequence] = set()
    sampling = SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9)
    prompts = [
        Prompt([5] * length, sampling, num_completions=2, needs_prompt_logprobs=True, top_k=2)
        for length in (7, 40, 200, 9)
    ]
    with (
        patch.object(GenerationRun, "_forward", remember_sampled),
        patch.object(GenerationRun, "_append_tokens", append_tokens),
        patch.object(FakeTensor, "tolist", lambda self: torch.zeros(self.shape).tolist()),
    ):
        outputs = rank.built.generator.generate(prompts)
    assert [len(output.completions) for output in outputs] == [2] * 4
    # Prompts, and then three times a token of each sequence.
    assert passes[1:] == [len(local)] * 3, passes


def check_capacity(rank: BuiltRank) -> None:
    """The KV cache has half of the memory that weights leave."""
    generator = replace(rank.built.generator, kv_cache_tokens=sys.maxsize)
    free = rank.mode.roofline.device.memory - rank.mode.memory.now
    assert 0 < rank.mode.memory.now < 0.5 * free
    per_token = sum(generator.kv_cache_bytes_per_token.values())
    assert not generator.state_bytes
    page = generator.page_size
    longest = int(free / per_token)
    lengths = [page] * (longest // page)
    capacity = generator._allocate(lengths, keeps=False).max_length + page
    assert capacity == pytest.approx(free / 2 / per_token, rel=0.001)
