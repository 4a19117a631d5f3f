"""Generation on fake GPUs: a prefill, and decode steps of its sequences."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.batching import ForwardBatch
from penstock.engine.generation.generator import Generator, PassResults
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import DecodingSequence, Prompt
from penstock.estimate.dryrun.rank import BuiltRank


def generate(rank: BuiltRank) -> None:
    """Generate with every rank's own prompts, and others' as if their replicas ran beside it."""
    # Fake tensors have no values: what would be read of them is what a real run reads.
    sampled: list[DecodingSequence] = []
    forward = Generator._forward

    def remember_sampled(generator: Generator, batch: ForwardBatch, results: PassResults) -> None:
        sampled[:] = [seq for sequences in batch.after for seq in sequences]
        # All that this replica has: its prompts fit one pass.
        local.update(seq.index for seq in sampled)
        passes.append(batch.batch.num_tokens)
        forward(generator, batch, results)

    def append_tokens(
        generator: Generator,
        sequences: Sequence[DecodingSequence],
        samples: torch.Tensor,
        *args: Any,
    ) -> None:
        del generator, args
        assert samples.device.type == "cuda"
        for seq in sequences:
            if (seq in sampled or seq.index not in local) and not seq.finish_reason:
                seq.append(0, 0.0, None)

    passes: list[int] = []
    local: set[int] = set()
    sampling = SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9)
    prompts = [
        Prompt([5] * length, sampling, num_completions=2, needs_prompt_logprobs=True, top_k=2)
        for length in (7, 40, 200, 9)
    ]
    with (
        patch.object(Generator, "_forward", remember_sampled),
        patch.object(Generator, "_append_tokens", append_tokens),
        patch.object(ProcessInfo, "max_over_ranks", lambda _, *values: list(values)),
        patch.object(FakeTensor, "tolist", lambda self: torch.zeros(self.shape).tolist()),
    ):
        outputs = rank.built.generator.generate(prompts)
    assert [len(output.completions) for output in outputs] == [2] * 4
    # Prompts, and then three times a token of each sequence.
    assert passes[1:] == [len(local)] * 3, passes
