"""Generation: sample completions from the current weights of the model in training.

Every rank takes part in every pass, under any layout, and every rank gets all completions.
Sequences are split over replicas; apart from rounding, samples do not depend on that. Ring
attention has no KV cache, and neither have sequences so long that RoPE scaling depends on their
length: each of their tokens costs a full forward pass.

T tokens of a pass, S positions where a token is sampled or scored, C positions of a chunk, V
vocabulary.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.tensor_sharding import shard_range
from penstock.engine.distributed.validate_layout import tokens_multiple
from penstock.engine.distributed.vocab_parallel import LogitsOf
from penstock.engine.generation.batching import (
    ForwardBatch,
    FullRecomputeDecode,
    KVCachedDecode,
    Limits,
    Passes,
    padding_pass,
)
from penstock.engine.generation.logprobs import PromptLogprobs, TopLogprobs
from penstock.engine.generation.sampling import sample_token
from penstock.engine.generation.sequences import (
    Completion,
    Decode,
    DecodingSequence,
    GenerationOutput,
    Prompt,
)
from penstock.models.decoder_config import DecoderConfig

KEPT_TOKENS = 1 << 17
PASSED_TOKENS = 1 << 13


class NotFiniteError(PenstockError):
    """The model's logits are NaN or infinite."""


Between = Callable[[], None]
"""Called on every rank before each pass. An exception, raised on all ranks, ends the generation."""


def _nothing() -> None:
    """Do nothing between passes."""


OnToken = Callable[[int, int], None]
"""Called on every rank with the prompt's index and each sampled token, as soon as it is known: for
streaming.
"""


def _no_stream(_prompt: int, _token: int) -> None:
    """Do not stream tokens."""


class Found(NamedTuple):
    """The results of passes on the rank that computes them."""

    drawn: torch.Tensor
    """For each sequence the next token, its log-prob, and whether the logits are non-finite: fp64
    [3, sequences]; -inf if this pass or rank samples none.
    """
    of_prompts: PromptLogprobs
    of_answers: TopLogprobs


@dataclass(frozen=True)
class Generator:
    """Generates with the model in training."""

    layout: ParallelModel
    ranks: ProcessInfo
    logits: LogitsOf
    multiple: int
    """The padding multiple of a pass under this layout."""
    keeps_up_to: float
    """The longest sequence, prompt included, that uses the KV cache; longer ones are recomputed for
    each token.
    """
    kept_bytes: int
    """KV cache bytes per token on this rank."""
    eagerly: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context manager around generation that disables compilation, because passes change shape."""
    kept_tokens: int = KEPT_TOKENS
    """KV cache capacity of a replica in tokens, limited to half of the GPU's free memory; other
    sequences wait.
    """
    passed_tokens: int = PASSED_TOKENS
    """Prompt tokens in a pass."""

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        decode: Decode | None = None,
        *,
        between: Between = _nothing,
        on_token: OnToken = _no_stream,
    ) -> list[GenerationOutput]:
        """Generate the completions of each prompt, on every rank; all ranks must pass the same
        prompts.

        A completion depends on its prompt, its sampling parameters, the seed and its index among
        the completions of the prompt, and not on other prompts. `decode` is needed for stop texts.

        Raises:
            ConfigError: for a prompt that is empty, leaves no room in the model's context, or
                has token ids outside the vocabulary; for stop texts without `decode`.
            NotFiniteError: the model's logits are not finite.
        """
        for number, prompt in enumerate(prompts):
            self.require_possible(f"prompt {number}", prompt, decode)
        growing = self._growing(prompts)
        of_prompts, of_answers = PromptLogprobs(prompts, self.ranks.device), TopLogprobs()
        passes = self._passes(growing)
        with self.eagerly(), self.layout.eval_mode():
            while not all(one.ended for one in growing):
                between()
                self.ranks.heartbeat.set_phase("answering prompts")
                found = Found(self._no_samples(len(growing)), of_prompts, of_answers)
                self._forward(self._next_batch(passes), found)
                self._append_tokens(growing, found.drawn, decode, on_token)
                for each in passes:
                    each.remove_finished()
        of_prompts.all_reduce(self.ranks)
        top_k_logprobs = of_answers.gather(growing, self.ranks)
        answers: list[list[Completion]] = [[] for _ in prompts]
        for one in growing:
            answers[one.prompt_number].append(one.to_completion(top_k_logprobs.get(one.number)))
        return [GenerationOutput(its, *of_prompts.of(number)) for number, its in enumerate(answers)]

    def require_possible(self, name: str, prompt: Prompt, decode: Decode | None = None) -> None:
        """Raise ConfigError for a prompt that cannot be completed; `name` is used in the
        message.
        """
        length, limit = len(prompt.tokens), self._config.max_position_embeddings
        if not length:
            raise ConfigError(f"{name} has no token. Give it one at least.")
        if length > limit or (length == limit and prompt.how.max_tokens != 0):
            raise ConfigError(
                f"{name} has {length} tokens, and the model's context ends at {limit}.\n"
                "  Shorten it, so that there is room for an answer."
            )
        size = self._config.vocab_size
        if strangers := [token for token in prompt.tokens if not 0 <= token < size]:
            raise ConfigError(
                f"{name} has token {strangers[0]}, and the model's vocabulary ends at {size - 1}."
            )
        if prompt.count < 1:
            raise ConfigError(f"{prompt.count} answers are asked to {name}. Ask for 1.")
        for asked in (prompt.prompt_top_k, prompt.top_k):
            if not 0 <= asked <= size:
                raise ConfigError(
                    f"the top {asked} tokens are requested of {name}, and the model's vocabulary "
                    f"has {size}."
                )
        if prompt.how.stop_texts and decode is None:
            raise ConfigError(
                f"the answers to {name} end with a text, and there is no tokenizer to tell it by.\n"
                "  Give stop tokens."
            )

    @property
    def _config(self) -> DecoderConfig:
        return self.layout.parts[0].config

    def _passes(self, growing: Sequence[DecodingSequence]) -> list[Passes]:
        """This replica's share of the sequences.

        They are consecutive, so that completions of one prompt stay together.
        """
        mesh = self.layout.mesh
        mine = shard_range(len(growing), mesh.dims.num_replicas, mesh.index("replicate", "shard"))
        here = [growing[number] for number in mine]
        limits = Limits(self._cache_capacity(), self.passed_tokens, self.multiple)
        kept = [one for one in here if one.max_length <= self.keeps_up_to]
        others = [one for one in here if one.max_length > self.keeps_up_to]
        return [
            KVCachedDecode(kept, limits, self.ranks.device),
            FullRecomputeDecode(others, limits),
        ]

    def _next_batch(self, passes: Sequence[Passes]) -> ForwardBatch:
        """The next pass, or a padding pass."""
        found = (each.next_batch() for each in passes)
        return next((one for one in found if one), None) or padding_pass(self.multiple)

    def _cache_capacity(self) -> int:
        """The KV cache capacity in tokens; free GPU memory may limit it."""
        if self.ranks.device.type != "cuda":
            return self.kept_tokens
        free, _ = torch.cuda.mem_get_info(self.ranks.device)
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        # A pipeline stage may have no layer, and so no cache.
        fits = (free + held) // 2 // max(1, self.kept_bytes)
        # All ranks of a replica must admit the same sequences.
        return min(self.kept_tokens, -self.ranks.max_over_ranks(-fits)[0])

    def _growing(self, prompts: Sequence[Prompt]) -> list[DecodingSequence]:
        [seeds, *_] = self.ranks.all_gather([secrets.randbits(63) for _ in prompts])
        limit = self._config.max_position_embeddings
        found: list[DecodingSequence] = []
        for number, (prompt, fresh) in enumerate(zip(prompts, seeds, strict=True)):
            room, most = limit - len(prompt.tokens), prompt.how.max_tokens
            most = room if most is None else min(room, most)
            seed = fresh if prompt.how.seed is None else prompt.how.seed
            for sample in range(prompt.count):
                found.append(DecodingSequence(len(found), number, prompt, sample, most, seed))
        return found

    def _no_samples(self, count: int) -> torch.Tensor:
        return torch.full((3, count), -torch.inf, dtype=torch.float64, device=self.ranks.device)

    def _append_tokens(
        self,
        growing: Sequence[DecodingSequence],
        drawn: torch.Tensor,
        decode: Decode | None,
        on_token: OnToken,
    ) -> None:
        """Append the tokens that any rank has sampled."""
        if self.ranks.world_size > 1:
            # The maximum merges replicas, and ranks of a replica agree.
            drawn = self.ranks.all_reduce_max(drawn)
        tokens, log_probs, flaws = drawn.tolist()
        if max(flaws) > 0:
            raise NotFiniteError("the model's logits are not finite: its weights have diverged.")
        for one, token, log_prob in zip(growing, tokens, log_probs, strict=True):
            if token >= 0:
                one.append(int(token), log_prob, decode)
                on_token(one.prompt_number, int(token))

    def _forward(self, one: ForwardBatch, found: Found) -> None:
        """Run a forward pass, sampling and scoring in `reduce`."""
        # Computed on the host, to avoid a GPU synchronization.
        slots_T = self.layout.context.shard_tensor(one.slots_T())
        places_S = (slots_T >= 0).nonzero().squeeze(1)
        after = [one.after[slot] for slot in slots_T[places_S].tolist()]
        reduce = partial(self._sample, one, self._there(places_S), after, found)
        call = self.layout.build_inputs(one.batch, reduce, self.ranks.device)
        self.layout.forward_only(replace(call, segments=one.segments(call.segments)))

    def _sample(
        self,
        one: ForwardBatch,
        places_S: torch.Tensor,
        after_S: Sequence[Sequence[DecodingSequence]],
        found: Found,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        """Sample the next tokens at this rank's positions, and record requested prompt logprobs."""
        start = 0
        for some, logits_CV in self.logits(hidden, head, places_S):
            groups = after_S[start : start + len(some)]
            start += len(some)
            after = [growing for group in groups for growing in group]
            wide_CV = logits_CV.float()
            if len(after) != len(groups):
                wide_CV = wide_CV[[row for row, group in enumerate(groups) for _ in group]]
            uniforms = [growing.uniform() for growing in after]
            tokens_S, log_probs_S = sample_token(
                wide_CV, [one.prompt.how for one in after], uniforms
            )
            told = torch.stack((tokens_S.double(), log_probs_S, ~log_probs_S.isfinite()))
            found.drawn[:, [growing.number for growing in after]] = told
            found.of_answers.record(after, wide_CV)
        if read := one.read():
            self._score_prompts(one, read, found, hidden, head)
        return hidden.new_zeros((), dtype=torch.float32)

    def _score_prompts(
        self,
        one: ForwardBatch,
        read: Sequence[tuple[int, DecodingSequence]],
        found: Found,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> None:
        """Score each token of these prompts except the first."""
        into_T = torch.full((sum(one.batch.lengths),), -1, dtype=torch.int64)
        for start, growing in read:
            places = found.of_prompts.places(growing.prompt_number)
            into_T[start : start + len(places)] = torch.arange(places.start, places.stop)
        part = self.layout.context.shard_tensor
        into_T, next_T = part(into_T), part(one.batch.input_ids_T.roll(-1))
        places_S = (into_T >= 0).nonzero().squeeze(1)
        into_S, next_S = (self._there(x_T[places_S]) for x_T in (into_T, next_T))
        start = 0
        for some, logits_CV in self.logits(hidden, head, self._there(places_S)):
            here = slice(start, start + len(some))
            start += len(some)
            log_probs_CV = logits_CV.float().log_softmax(-1)
            if log_probs_CV.isnan().any():
                found.drawn[2, read[0][1].number] = 1
                continue
            found.of_prompts.record(into_S[here], next_S[here], log_probs_CV)

    def _there(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.ranks.device, non_blocking=True)


def build_generator(
    train: TrainConfig, layout: ParallelModel, ranks: ProcessInfo, logits: LogitsOf
) -> Generator:
    """The generator of a model with these settings and layout."""
    config, degrees = layout.parts[0].config, layout.mesh.dims
    heads = -(-config.num_key_value_heads // (degrees.tensor * degrees.ulysses))
    layers = sum(len(part.model.layers) for part in layout.parts)
    numbers = 2 * layers * heads * config.head_dim
    generator = Generator(
        layout,
        ranks,
        logits,
        tokens_multiple(train),
        keeps_up_to=config.rope_invariant_up_to if layout.context.supports_kv_cache else 0,
        kept_bytes=numbers * getattr(torch, train.computes_in).itemsize,
    )
    if not train.enable_compile:
        return generator
    return replace(generator, eagerly=partial(torch.compiler.set_stance, "force_eager"))
