"""Answers to prompts: from the base model, or from what a client's model once was.

What is drawn from takes the place of the model that is in the base, which comes back when it is
computed with again. Adapters that were drawn from lately are kept.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from penstock.adapters.names import factor_of
from penstock.adapters.scale import scale_of
from penstock.engine.adapter_start import AdapterStart
from penstock.engine.drawing import Drawing
from penstock.engine.parallel.pieces import local
from penstock.engine.resident_files import sampler_in
from penstock.engine.resident_ranks import padded, rank_dim
from penstock.engine.residents import Residents
from penstock.engine.sequences import Answered, Decode, Prompt
from penstock.engine.weights import cut_into
from penstock.server.protocol.commands import Generate, Generated
from penstock.server.protocol.results import Sampled
from penstock.server.protocol.values import Array
from penstock.server.protocol.values import Sequence as Drawn

KEPT = 4
"""Adapters."""


@dataclass(frozen=True)
class Loaded:
    """An adapter to draw from."""

    weights: Sequence[torch.Tensor]
    """This rank's parts of the base's trainable tensors."""
    scale: float


@dataclass
class Sampling:
    """What these ranks draw from. Every rank makes the same calls."""

    residents: Residents
    decode: Decode
    kept: OrderedDict[tuple[str, int], Loaded] = field(
        default_factory=OrderedDict[tuple[str, int], Loaded]
    )
    """By folder and the time of its writing, the last one drawn from at the end."""

    def generate(self, order: Generate) -> Generated:
        """The answers to all prompts of an order.

        Raises ArtifactError for a folder with nothing to sample from, ConfigError for a prompt that
        cannot be answered.
        """
        prompts = [self._prompt(order, number) for number in range(len(order.prompts))]
        self._fill(Path(order.adapter) if order.adapter else None)
        found = self.residents.substrate.built.generator.generate(prompts, self.decode)
        return Generated(sampled=tuple(map(_sampled, found)))

    def _prompt(self, order: Generate, number: int) -> Prompt:
        said = order.settings[number]
        scored = order.prompt_logprobs[number] if order.prompt_logprobs else False
        return Prompt(
            [int(token) for token in order.prompts[number].numpy()],
            Drawing(
                max_tokens=said.max_tokens,
                temperature=said.temperature,
                top_k=said.top_k,
                top_p=said.top_p,
                seed=said.seed,
                stop_tokens=said.stop_tokens,
                stop_texts=said.stop_texts,
            ),
            count=order.counts[number],
            scored=scored,
            likeliest=order.topk[number] if order.topk else 0,
        )

    def _fill(self, folder: Path | None) -> None:
        """Let the base compute as what is in a folder; None: as itself."""
        residents = self.residents
        if folder is not None:
            sampler_in(folder)
        if residents.substrate.sharing == "alone":
            residents.vacate()
            residents.substrate.refill(folder)
        elif folder is None:
            residents.put_no_adapter()
        else:
            loaded = self._loaded(folder)
            residents.put_adapter(loaded.weights, loaded.scale)

    def _loaded(self, folder: Path) -> Loaded:
        key = (str(folder), folder.stat().st_mtime_ns)
        if key not in self.kept:
            self.kept[key] = self._read(folder)
        self.kept.move_to_end(key)
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return self.kept[key]

    @torch.no_grad()
    def _read(self, folder: Path) -> Loaded:
        said, substrate = sampler_in(folder), self.residents.substrate
        rank, layers = int(said["rank"]), list(said["layers"])
        begun = AdapterStart(folder, layers, substrate.names)
        weights: list[torch.Tensor] = []
        for one in substrate.trainable:
            here = torch.zeros_like(local(one.parameter.detach()))
            for piece in one.pieces:
                factor = factor_of(piece.tensor)
                assert factor is not None, f"{piece.tensor} is no part of an adapter"
                if factor.hf_module not in layers:
                    continue
                shape = list(piece.whole)
                shape[rank_dim(factor, len(shape))] = rank
                whole = padded(piece.tensor, begun(piece.tensor, tuple(shape)), piece.whole)
                cut_into(whole, piece, piece.of(here))
            weights.append(here)
        return Loaded(weights, scale_of(rank, said["alpha"], "rank"))


def _sampled(found: Answered) -> Sampled:
    """As it is sent."""
    prompt = found.log_probs_T
    tokens, likeliest = found.likeliest_TK, found.likeliest_log_probs_TK
    return Sampled(
        sequences=tuple(
            Drawn(
                stop_reason=answer.ended,
                tokens=Array.of(np.array(answer.tokens, np.int32), "int32"),
                logprobs=Array.of(np.array(answer.log_probs, np.float32), "float32"),
            )
            for answer in found.answers
        ),
        prompt_logprobs=None if prompt is None else Array.of(prompt.numpy(), "float32"),
        topk_prompt_tokens=None if tokens is None else Array.of(tokens.numpy(), "int32"),
        topk_prompt_logprobs=None if likeliest is None else Array.of(likeliest.numpy(), "float32"),
    )
