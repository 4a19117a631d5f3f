"""Generation: sample completions from the current weights of the model in training.

Every rank takes part in every pass, under any layout, and every rank gets all completions.
Sequences are split over replicas; apart from rounding, samples do not depend on that. Ring
attention has no KV cache, and neither have sequences so long that RoPE scaling depends on their
length: each of their tokens costs a full forward pass.

T tokens of a pass, S positions where a token is sampled or scored, C positions of a chunk, V
vocabulary.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.machine.linux import memory_bytes
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.tensor_sharding import shard_range
from penstock.engine.distributed.validate_layout import tokens_multiple
from penstock.engine.distributed.vocab_parallel import LogitsFn
from penstock.engine.generation.batching import (
    ForwardBatch,
    FullRecomputeDecode,
    Limits,
    PagedDecode,
    padding_pass,
)
from penstock.engine.generation.kv_cache import KVCache, Window
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
from penstock.models.layers.block import Block
from penstock.models.multi_token_prediction import PredictionLayer
from penstock.models.names import LINEAR_ATTN, SELF_ATTN
from penstock_kernels.packed_linear import is_packable, packed_weights
from penstock_kernels.to_device import to_device

FP32 = 4
KV_CACHE_TOKENS = 1 << 17
PREFILL_TOKENS = 1 << 13
PACKED_STEPS = 24
"""Decode steps from which on weights are packed on CPUs, which takes as long as a few of them."""
PACKED_SHARE = 0.2
"""Largest share of a machine's memory that packed weights take."""
PAGE_SIZE = 64
RUNNING = 256
"""Sequences that are decoded together, at most."""
ROOM_TO_GROW = 4
"""On a CPU, where memory is not used before it is written, tables get address space to grow in one
piece."""
KEPT_TOKENS = 1 << 15
"""Capacity of a KV cache that is kept between calls, at least."""


class NotFiniteError(PenstockError):
    """The model's logits are NaN or infinite."""


OnToken = Callable[[int, int], None]
"""Called on every rank with the prompt's index and each sampled token, as soon as it is known: for
streaming."""


class PassResults(NamedTuple):
    """The results of passes on the rank that computes them."""

    samples: torch.Tensor
    """For each sequence the next token, its log-prob, and whether the logits are non-finite: fp64
    [3, sequences]; -inf if this pass or rank samples none."""
    prompt_logprobs: PromptLogprobs
    completion_logprobs: TopLogprobs


class _CacheMemory(NamedTuple):
    """A KV cache, and what has room in it."""

    running: int
    """Sequences that are decoded together, at most."""
    cache: KVCache
    max_length: int
    """Tokens of a sequence that has the cache to itself."""


@dataclass(frozen=True)
class Generator:
    """Generates with the model in training."""

    layout: ParallelModel
    ranks: ProcessInfo
    logits: LogitsFn
    multiple: int
    max_cached_length: float
    """The longest sequence, prompt included, that uses the KV cache; longer ones are recomputed for
    each token."""
    kv_cache_bytes_per_token: Mapping[Window, int]
    """On this rank, by the windows of the whole model's layers."""
    splits_prompts: bool = True
    """Whether all layers can go on from cached tokens in passes of several tokens."""
    dtype: torch.dtype = torch.float32
    """Of products."""
    state_bytes: int = 0
    """Bytes of the states of layers for a sequence on this rank."""
    eager_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Disables compilation around generation, because passes change shape."""
    kv_cache_tokens: int = KV_CACHE_TOKENS
    """KV cache capacity of a replica in tokens, limited to half of the GPU's free memory; other
    sequences wait."""
    page_size: int = PAGE_SIZE
    """Tokens of a page of the KV cache."""
    prefill_tokens: int = PREFILL_TOKENS
    # A list, because the class is frozen: nothing, or the cache of the last call that keeps it.
    _memory: list[_CacheMemory] = field(default_factory=list, init=False, repr=False)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        decode: Decode | None = None,
        *,
        between: Callable[[], None] = lambda: None,
        on_token: OnToken = lambda _prompt, _token: None,
        weights_version: str | None = None,
    ) -> list[GenerationOutput]:
        """Generate the completions of each prompt, on every rank; all ranks must pass the same
        prompts.

        A completion depends on its prompt, its sampling parameters, the seed and its index among
        the completions of the prompt, and not on other prompts. `decode` is needed for stop texts.
        `between` is called before each pass; an exception, raised on all ranks, ends the
        generation.

        With a `weights_version`, which names the model's present weights, the KV cache is kept
        until `release_cache`: what begins like the tokens of an earlier call with the same version
        is not computed again.

        Raises:
            ConfigError: for a prompt that is empty, leaves no room in the model's context, or
                has token ids outside the vocabulary; for stop texts without `decode`.
            NotFiniteError: the model's logits are not finite.
        """
        for number, prompt in enumerate(prompts):
            self.require_possible(f"prompt {number}", prompt, decode)
        sequences = self._start_sequences(prompts)
        prompt_logprobs = PromptLogprobs(prompts, self.ranks.device)
        completion_logprobs = TopLogprobs()
        passes = self._passes(sequences, weights_version)
        # Around all passes: autocast keeps its copies of weights until the outermost context ends.
        with (
            self._releasing_on_error(),
            self._packed_weights(sequences),
            self.layout.autocast(),
            self.eager_context(),
            self.layout.eval_mode(),
        ):
            # Alike on every rank, because each appends the tokens of all.
            while not all(seq.finish_reason for seq in sequences):
                between()
                self.ranks.heartbeat.set_phase("generating")
                # Tokens and log-probs in one tensor, of which ranks take the maximum: fp64 holds
                # any token id.
                samples = torch.full(
                    (3, len(sequences)), -torch.inf, dtype=torch.float64, device=self.ranks.device
                )
                batches = (sequence_pass.next_batch() for sequence_pass in passes)
                batch = next((batch for batch in batches if batch), None)
                self._forward(
                    batch or padding_pass(self.multiple),
                    PassResults(samples, prompt_logprobs, completion_logprobs),
                )
                self._append_tokens(sequences, samples, decode, on_token)
                for sequence_pass in passes:
                    sequence_pass.remove_finished()
        prompt_logprobs.all_reduce(self.ranks)
        top_k_logprobs = completion_logprobs.gather(sequences, self.ranks)
        completions: list[list[Completion]] = [[] for _ in prompts]
        for seq in sequences:
            completions[seq.prompt_index].append(seq.to_completion(top_k_logprobs.get(seq.index)))
        return [
            GenerationOutput(prompt_completions, *prompt_logprobs.of(number))
            for number, prompt_completions in enumerate(completions)
        ]

    def require_possible(self, name: str, prompt: Prompt, decode: Decode | None = None) -> None:
        """Raise ConfigError for a prompt that cannot be completed; the message calls it `name`."""
        length, limit = len(prompt.tokens), self._config.max_position_embeddings
        if not length:
            raise ConfigError(f"{name} has no token. Write at least one.")
        if length > limit or (length == limit and prompt.sampling.max_tokens != 0):
            raise ConfigError(
                f"{name} has {length} tokens, and the model's context ends at {limit}.\n"
                "  Shorten it, so that there is room for a completion."
            )
        size = self._config.vocab_size
        if invalid := [token for token in prompt.tokens if not 0 <= token < size]:
            raise ConfigError(
                f"{name} has token {invalid[0]}, and the model's vocabulary ends at {size - 1}."
            )
        if prompt.num_completions < 1:
            raise ConfigError(
                f"{prompt.num_completions} completions are requested of {name}. Request at least 1."
            )
        for top_k in (prompt.prompt_top_k, prompt.top_k):
            if not 0 <= top_k <= size:
                raise ConfigError(
                    f"the top {top_k} tokens are requested of {name}, and the model's vocabulary "
                    f"has {size}."
                )
        if prompt.sampling.stop_texts and decode is None:
            raise ConfigError(
                f"{name} has stop texts, and there is no tokenizer to decode tokens.\n"
                "  Give stop tokens."
            )

    def release_cache(self) -> None:
        """Free the memory of a KV cache that was kept."""
        self._memory.clear()

    @contextmanager
    def _releasing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Sequences that have not ended have pages, which nobody would give back.
            self.release_cache()
            raise

    def _packed_weights(
        self, sequences: Sequence[DecodingSequence]
    ) -> AbstractContextManager[object]:
        """Linear layers on CPUs with packed weights, if there are steps enough to make up for the
        time, and there is memory for the copies."""
        is_short = max((seq.max_tokens for seq in sequences), default=0) < PACKED_STEPS
        if self.ranks.device.type != "cpu" or is_short:
            return nullcontext()
        layers = [
            module
            for part in self.layout.parts
            for module in part.modules()
            if isinstance(module, nn.Linear) and is_packable(module.weight, self.dtype)
        ]
        num_bytes = sum(layer.weight.nbytes for layer in layers) * self.ranks.world_size
        if num_bytes > PACKED_SHARE * (memory_bytes() or 0):
            return nullcontext()
        return packed_weights(layers, self.dtype)

    @property
    def _config(self) -> DecoderConfig:
        return self.layout.parts[0].config

    def _passes(
        self, sequences: Sequence[DecodingSequence], weights_version: str | None
    ) -> tuple[PagedDecode, FullRecomputeDecode]:
        # This replica's share is consecutive, so that completions of one prompt stay together.
        mesh = self.layout.mesh
        sequence_ids = shard_range(
            len(sequences), mesh.dims.num_replicas, mesh.index("replicate", "shard")
        )
        local_sequences = [sequences[number] for number in sequence_ids]
        cacheable = [seq for seq in local_sequences if seq.max_length <= self.max_cached_length]
        uncached = [seq for seq in local_sequences if seq.max_length > self.max_cached_length]
        keeps = weights_version is not None
        # What is kept has the same size on all replicas: all of them need another one together.
        lengths = [
            seq.max_length
            for seq in (sequences if keeps else cacheable)
            if seq.max_length <= self.max_cached_length
        ]
        running, cache, _ = self._find_memory(lengths, keeps=keeps)
        salt = (weights_version or "").encode()
        limits = Limits(running, self.prefill_tokens, self.multiple, self.splits_prompts, salt)
        gather = self.layout.context.gather_tokens
        return (
            PagedDecode(cacheable, limits, cache, self.ranks.device, gather),
            FullRecomputeDecode(uncached, limits),
        )

    def _find_memory(self, lengths: Sequence[int], *, keeps: bool) -> _CacheMemory:
        """Memory for sequences of these lengths: what is kept, if the longest has room there."""
        if keeps and self._memory and self._memory[0].max_length >= max(lengths, default=0):
            return self._memory[0]
        self.release_cache()
        memory = self._allocate(lengths, KEPT_TOKENS if keeps else 0)
        if keeps:
            self._memory.append(memory)
        return memory

    def _allocate(self, lengths: Sequence[int], least_tokens: int) -> _CacheMemory:
        running, tokens = RUNNING, self.kv_cache_tokens
        is_cuda = self.ranks.device.type == "cuda"
        if is_cuda:
            free, _ = torch.cuda.mem_get_info(self.ranks.device)
            # What torch's allocator holds and has not given out is free as well.
            free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            # A pipeline stage may have no layer, and so no cache.
            running = min(running, max(1, free // 4 // max(1, self.state_bytes)))
            per_token = max(1, sum(self.kv_cache_bytes_per_token.values()))
            tokens = min(tokens, (free // 2 - running * self.state_bytes) // per_token)
            # All ranks of a replica must admit the same sequences.
            least = self.ranks.max_over_ranks(-running, -tokens)
            running, tokens = -least[0], -least[1]
        # One sequence is always admitted. More than all of them need is not taken.
        pages = [-(-length // self.page_size) + 1 for length in lengths]
        needed = max(sum(pages) * (1 if is_cuda else ROOM_TO_GROW), least_tokens // self.page_size)
        total = max(min(tokens // self.page_size, needed), max(pages, default=0))
        num_pages: dict[Window, int] = {}
        for window in self.kv_cache_bytes_per_token:
            # Of a long sequence only the window is kept, and what is computed in one pass.
            limit = running * (window or 0) + self.prefill_tokens
            limit = -(-limit // self.page_size) + 2 * running
            num_pages[window] = total if window is None else min(total, limit)
        cache = KVCache(num_pages, self.page_size, adjacent=not is_cuda)
        return _CacheMemory(running, cache, (total - 1) * self.page_size)

    def _start_sequences(self, prompts: Sequence[Prompt]) -> list[DecodingSequence]:
        # Rank 0's for all: the ranks of a replica must sample the same tokens.
        [seeds, *_] = self.ranks.all_gather([secrets.randbits(63) for _ in prompts])
        limit = self._config.max_position_embeddings
        results: list[DecodingSequence] = []
        for number, (prompt, fresh) in enumerate(zip(prompts, seeds, strict=True)):
            room, most = limit - len(prompt.tokens), prompt.sampling.max_tokens
            most = room if most is None else min(room, most)
            seed = fresh if prompt.sampling.seed is None else prompt.sampling.seed
            skipped = self.layout.skipped_positions(prompt.images)
            for sample in range(prompt.num_completions):
                seq = DecodingSequence(len(results), number, prompt, sample, most, seed)
                seq.skipped_positions = skipped
                results.append(seq)
        return results

    def _append_tokens(
        self,
        sequences: Sequence[DecodingSequence],
        samples: torch.Tensor,
        decode: Decode | None,
        on_token: OnToken,
    ) -> None:
        if self.ranks.world_size > 1:
            # The maximum merges replicas, and ranks of a replica agree.
            samples = self.ranks.all_reduce_max(samples)
        tokens, log_probs, flaws = samples.tolist()
        if max(flaws) > 0:
            raise NotFiniteError("the model's logits are not finite: its weights have diverged.")
        for seq, token, log_prob in zip(sequences, tokens, log_probs, strict=True):
            if token >= 0:
                seq.append(int(token), log_prob, decode)
                on_token(seq.prompt_index, int(token))

    def _forward(self, batch: ForwardBatch, results: PassResults) -> None:
        # Computed on the host, to avoid a GPU synchronization.
        slots_T = self.layout.context.shard_tensor(batch.slots_T())
        places_S = (slots_T >= 0).nonzero().squeeze(1)
        after = [batch.after[slot] for slot in slots_T[places_S].tolist()]
        if not after:
            # A chunk of a prompt, or padding: the head's collectives need a row all the same.
            places_S, after = torch.zeros(1, dtype=torch.int64), [[]]
        reduce = partial(self._sample, batch, self._to_device(places_S), after, results)
        call = self.layout.build_inputs(batch.batch, reduce, self.ranks.device)
        self.layout.forward_only(replace(call, segments=batch.segments(call.segments)))

    def _sample(
        self,
        batch: ForwardBatch,
        places_S: torch.Tensor,
        after_S: Sequence[Sequence[DecodingSequence]],
        results: PassResults,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        """Sample the next tokens at this rank's positions, and record requested prompt logprobs."""
        start = 0
        for chunk, logits_CV in self.logits(hidden, head, places_S):
            groups = after_S[start : start + len(chunk)]
            start += len(chunk)
            after = [seq for group in groups for seq in group]
            if not after:
                continue
            wide_CV = logits_CV.float()
            # The sequences of a prompt begin with the same logits, which are then computed once.
            if len(after) != len(groups):
                wide_CV = wide_CV[[row for row, group in enumerate(groups) for _ in group]]
            uniforms = [sequences.uniform() for sequences in after]
            tokens_S, log_probs_S = sample_token(
                wide_CV, [seq.prompt.sampling for seq in after], uniforms
            )
            sampled = torch.stack((tokens_S.double(), log_probs_S, ~log_probs_S.isfinite()))
            results.samples[:, [sequences.index for sequences in after]] = sampled
            results.completion_logprobs.record(after, wide_CV)
        if read := batch.read():
            self._score_prompts(batch, read, results, hidden, head)
        return hidden.new_zeros((), dtype=torch.float32)

    def _score_prompts(
        self,
        batch: ForwardBatch,
        read: Sequence[tuple[int, DecodingSequence]],
        results: PassResults,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> None:
        into_T = torch.full((sum(batch.batch.lengths),), -1, dtype=torch.int64)
        for start, sequences in read:
            # One token less than the prompt has: a position predicts the token after it.
            scored = results.prompt_logprobs.places(sequences.prompt_index)
            into_T[start : start + len(scored)] = torch.arange(scored.start, scored.stop)
        part = self.layout.context.shard_tensor
        into_T, next_T = part(into_T), part(batch.batch.input_ids_T.roll(-1))
        places_S = (into_T >= 0).nonzero().squeeze(1)
        into_S, next_S = (self._to_device(x_T[places_S]) for x_T in (into_T, next_T))
        start = 0
        for chunk, logits_CV in self.logits(hidden, head, self._to_device(places_S)):
            rows = slice(start, start + len(chunk))
            start += len(chunk)
            log_probs_CV = logits_CV.float().log_softmax(-1)
            # Raised by all ranks together, in `_append_tokens`: the others are in this pass too.
            if log_probs_CV.isnan().any():
                results.samples[2, read[0][1].index] = 1
                continue
            results.prompt_logprobs.record(into_S[rows], next_S[rows], log_probs_CV)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return to_device(values, self.ranks.device)


def build_generator(
    train: TrainConfig, layout: ParallelModel, ranks: ProcessInfo, logits: LogitsFn
) -> Generator:
    """The generator of a model with these settings and layout."""
    config, degrees = layout.parts[0].config, layout.mesh.dims
    split = degrees.tensor * degrees.ulysses
    # Layers that predict further tokens, which the last pipeline stage has, are not run.
    blocks = [block for part in layout.parts for block in part.blocks]
    blocks = [block for block in blocks if not isinstance(block, PredictionLayer)]
    linear = sum(isinstance(block, Block) and block.mixer_name == LINEAR_ATTN for block in blocks)
    # Keys and values; the heads of different kinds of layers may have different sizes.
    numbers = max(
        2 * -(-kind.num_key_value_heads // split) * kind.head_dim for kind in config.layer_kinds
    )
    if config.latent:
        # One vector for all heads (DeepSeek-V2, arXiv:2405.04434, section 2.1).
        numbers = config.latent.cached_dim
    numbers *= getattr(torch, train.computes_in).itemsize
    layers = range(config.num_layers)
    windows = [config.layer_window(i) for i in layers if config.layer_mixer(i) == SELF_ATTN]
    # Also the kinds of layers of other pipeline stages: all have the same tables.
    bytes_per_token: dict[Window, int] = dict.fromkeys(windows, 0)
    for block in blocks:
        if not isinstance(block, Block) or block.mixer_name == SELF_ATTN:
            window = getattr(getattr(block, SELF_ATTN, None), "window", None)
            bytes_per_token[window] = bytes_per_token.get(window, 0) + numbers
    state_size = 0
    if config.linear:
        local_heads = config.linear.heads_of_rank(degrees.tensor, degrees.ulysses)[-1]
        state_size = config.linear.state_size * local_heads // config.linear.exchanged[-1][0]
    has_cache, force_eager = layout.context.supports_kv_cache(config), train.enable_compile
    return Generator(
        layout,
        ranks,
        logits,
        tokens_multiple(train),
        max_cached_length=config.cacheable_length if has_cache else 0,
        kv_cache_bytes_per_token=bytes_per_token,
        # Indexers and recurrent states have no passes that go on with several tokens.
        splits_prompts=not (config.linear_layers or config.indexer),
        dtype=getattr(torch, train.computes_in),
        state_bytes=FP32 * linear * state_size,
        eager_context=(
            partial(torch.compiler.set_stance, "force_eager") if force_eager else nullcontext
        ),
    )
