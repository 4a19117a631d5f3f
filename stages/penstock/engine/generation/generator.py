"""Generation: sample completions from the current weights of the model in training.

Every rank takes part in every pass, under any layout, and every rank gets all completions.
Sequences are split over replicas; apart from rounding, samples do not depend on that. Ring
attention has no KV cache, and neither have sequences so long that RoPE scaling depends on their
length: each of their tokens costs a full forward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.core.machine.linux import memory_bytes
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.tensor_sharding import shard_range
from penstock.engine.distributed.validate_layout import tokens_multiple
from penstock.engine.distributed.vocab_parallel import LogitsFn
from penstock.engine.generation.batching import Limits
from penstock.engine.generation.kv_cache import KVCache, Window
from penstock.engine.generation.run import CacheMemory, GenerationRun, OnToken
from penstock.engine.generation.sequences import Decode, GenerationOutput, Prompt
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.block import Block
from penstock.models.multi_token_prediction import PredictionLayer
from penstock.models.names import LINEAR_ATTN, SELF_ATTN
from penstock_kernels.packed_linear import is_packable, packed_weights

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
UNKNOWN_MEMORY = 1 << 40
"""Bytes of a machine that does not say how many it has."""
KEPT_TOKENS = 1 << 15
"""Capacity of a KV cache that is kept between calls on CPUs, at least."""


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
    """KV cache capacity of a replica in tokens, limited to half of the GPU's free memory, or to a
    quarter of the machine's shared by its ranks; other sequences wait."""
    page_size: int = PAGE_SIZE
    """Tokens of a page of the KV cache."""
    prefill_tokens: int = PREFILL_TOKENS
    # A list, because the class is frozen: nothing, or the cache of the last call that keeps it.
    _memory: list[CacheMemory] = field(default_factory=list, init=False, repr=False)

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
        if not prompts:
            return []
        with self.run(prompts, decode, on_token=on_token, weights_version=weights_version) as run:
            request = run.add(prompts)
            while not run.is_finished:
                between()
                run.step()
            if request.error:
                raise request.error
            return request.outputs

    @contextmanager
    def run(
        self,
        prompts: Sequence[Prompt],
        decode: Decode | None = None,
        *,
        on_token: OnToken = lambda _prompt, _token: None,
        weights_version: str | None = None,
    ) -> Iterator[GenerationRun]:
        """A run with memory for these prompts, none of which is added yet. The other arguments are
        those of `generate`, for all prompts of the run.

        Raises:
            ConfigError: as `generate`.
        """
        for number, prompt in enumerate(prompts):
            self.require_possible(f"prompt {number}", prompt, decode)
        context_length = self._config.max_position_embeddings
        max_new_tokens = [prompt.max_new_tokens(context_length) for prompt in prompts]
        lengths = [
            len(prompt.tokens) + new_tokens
            for prompt, new_tokens in zip(prompts, max_new_tokens, strict=True)
            for _ in range(prompt.num_completions)
        ]
        memory = self._find_memory(lengths, keeps=weights_version is not None)
        salt = (weights_version or "").encode()
        limits = Limits(
            memory.running, self.prefill_tokens, self.multiple, self.splits_prompts, salt
        )
        # Around all passes: autocast keeps its copies of weights until the outermost context ends.
        with (
            self._releasing_on_error(),
            self._packed_weights(max(max_new_tokens)),
            torch.no_grad(),
            self.layout.autocast(),
            self.eager_context(),
            self.layout.eval_mode(),
        ):
            yield GenerationRun(
                self.layout,
                self.ranks,
                self.logits,
                memory,
                limits,
                self.max_cached_length,
                decode,
                on_token,
            )

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

    def _packed_weights(self, steps: int) -> AbstractContextManager[object]:
        """Linear layers on CPUs with packed weights, if there are steps enough to make up for the
        time, and there is memory for the copies."""
        if self.ranks.device.type != "cpu" or steps < PACKED_STEPS:
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

    def _find_memory(self, lengths: Sequence[int], *, keeps: bool) -> CacheMemory:
        """Memory for sequences of these lengths: what is kept, if the longest has room there."""
        if not keeps:
            mesh = self.layout.mesh
            own = mesh.index("replicate", "shard")
            # Those of this replica. What is kept has the same size on all replicas: they need
            # another one together, and any of them has room for what is added later.
            share = shard_range(len(lengths), mesh.dims.num_replicas, own)
            lengths = lengths[share.start : share.stop]
        lengths = [length for length in lengths if length <= self.max_cached_length]
        if keeps and self._memory and self._memory[0].max_length >= max(lengths, default=0):
            return self._memory[0]
        self.release_cache()
        memory = self._allocate(lengths, keeps=keeps)
        if keeps:
            self._memory.append(memory)
        return memory

    def _allocate(self, lengths: Sequence[int], *, keeps: bool) -> CacheMemory:
        is_cuda = self.ranks.device.type == "cuda"
        if is_cuda:
            free, _ = torch.cuda.mem_get_info(self.ranks.device)
            # What torch's allocator holds and has not given out is free as well.
            free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        else:
            free = int(memory_bytes() or UNKNOWN_MEMORY) // 2 // self.ranks.world_size
        # A pipeline stage may have no layer, and so no cache.
        running = min(RUNNING, max(1, free // 4 // max(1, self.state_bytes)))
        per_token = max(1, sum(self.kv_cache_bytes_per_token.values()))
        tokens = (free // 2 - running * self.state_bytes) // per_token
        if self.ranks.world_size > 1:
            # All ranks of a replica must admit the same sequences.
            least = self.ranks.max_over_ranks(-running, -tokens)
            running, tokens = -least[0], -least[1]
        tokens = min(tokens, self.kv_cache_tokens)
        # What is kept has room for later calls, too.
        least_tokens = 0 if not keeps else self.kv_cache_tokens if is_cuda else KEPT_TOKENS
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
        return CacheMemory(running, cache, (total - 1) * self.page_size)


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
