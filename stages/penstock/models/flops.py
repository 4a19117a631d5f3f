"""FLOPs of a decoder, and attention pairs.

A matmul of [T, n] and [n, m] takes 2 T n m FLOPs. A training step has the forward matmul, the
gradient of its input, which takes as many, and that of its weight if it is trainable, which takes
as many again. Recomputation by activation checkpointing is not counted (model FLOPs, not hardware
FLOPs). Nor is anything but matmuls (norms, activations, softmax), at most a hundredth of the total.
Follows Chowdhery et al. 2022, "PaLM", appendix B, except that masked pairs of tokens are not
counted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.decoder_config import DecoderConfig

Part = Literal["attention", "network", "head"]
"""Parts of a decoder: attention with its projections, MLPs or experts, and the head."""

PARTS: tuple[Part, ...] = ("attention", "network", "head")


@dataclass(frozen=True)
class Work:
    """Token and attention pair counts of some documents."""

    tokens: int
    """Tokens without padding."""
    attention_pairs: int
    """(query, key) pairs of causal attention within documents, including each token with itself."""
    local_pairs: int
    """The same for a layer with a sliding window, with attention in chunks, or with an indexer."""
    logits: int
    """Tokens whose logits are computed: those with a loss."""

    @classmethod
    def from_lengths(
        cls, config: DecoderConfig, lengths: Iterable[int], *, logits: int | None = None
    ) -> "Work":
        """The work of documents with these lengths. `logits` None: all tokens have a loss."""
        tokens = pairs = local_pairs = 0
        window, chunk = config.most_keys, config.attention_chunk
        for length in lengths:
            tokens += length
            pairs += length * (length + 1) // 2
            if window is not None:
                # The first tokens of a document have fewer keys than the window.
                full = min(length, window)
                local_pairs += full * (full + 1) // 2 + (length - full) * window
            elif chunk is not None:
                # The last chunk of a document may be shorter.
                count, remainder = divmod(length, chunk)
                local_pairs += (count * chunk * (chunk + 1) + remainder * (remainder + 1)) // 2
        return cls(tokens, pairs, local_pairs, tokens if logits is None else logits)

    @classmethod
    def from_totals(
        cls, config: DecoderConfig, tokens: int, squares: int, *, logits: int | None = None
    ) -> "Work":
        """The work of documents with `tokens` tokens, whose squared lengths sum to `squares`.

        With a sliding window it is an upper estimate, too high by less than half a squared window
        per document: every token counts a full window, up to the pairs of full attention. With
        chunks every token counts half a chunk.
        """
        pairs = (squares + tokens) // 2
        local_pairs = min(pairs, _local_keys(config) * tokens)
        return cls(tokens, pairs, local_pairs, tokens if logits is None else logits)

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens + other.tokens,
            self.attention_pairs + other.attention_pairs,
            self.local_pairs + other.local_pairs,
            self.logits + other.logits,
        )


@dataclass(frozen=True)
class TrainableParams:
    """Which matrices are trainable."""

    base: Literal["learns", "frozen"] = "learns"
    """The base model's matrices. For frozen ones only the input gradient is computed."""
    adapter_params: int = 0
    """Parameters of adapters that each token is multiplied with; trainable."""
    head_adapter_params: int = 0
    """Those of them at the head, which only see tokens whose logits are computed."""


FULL_FINETUNING = TrainableParams()


def step_flops(
    config: DecoderConfig, work: Work, *, learning: TrainableParams = FULL_FINETUNING
) -> float:
    """FLOPs of one optimizer step over `work`: forward and backward pass.

    Adapters cost three matmuls like other trainable matrices; frozen matrices cost two. In a frozen
    model the input gradient of the first layer is counted although it may not be computed: less
    than a hundredth of a large model's total.
    """
    matmul_macs = sum(_matmul_macs(config, work, part) for part in PARTS)
    # The forward pass, the gradient of the input and, if it is trained, that of the weight.
    passes = 3 if learning.base == "learns" else 2
    inner = learning.adapter_params - learning.head_adapter_params
    factors = inner * work.tokens + learning.head_adapter_params * work.logits
    attention = 3 * core_attention_flops(config, work)
    return 2.0 * (passes * matmul_macs + 3 * factors) + attention + _indexer_flops(config, work)


def forward_flops(config: DecoderConfig, work: Work, *, parts: Iterable[Part] = PARTS) -> float:
    """FLOPs of these parts in one forward pass, which is also the cost of recomputing them."""
    chosen = set(parts)
    matmul_flops = 2.0 * sum(_matmul_macs(config, work, part) for part in chosen)
    if "attention" not in chosen:
        return matmul_flops
    return matmul_flops + core_attention_flops(config, work) + _indexer_flops(config, work)


def layer_flops(config: DecoderConfig, length: int) -> list[int]:
    """FLOPs of each layer in a forward pass over a document of `length` tokens, without layers that
    predict further ones."""
    count = config.num_hidden_layers
    if isinstance(config, AutoModelConfig):
        return [2 * length * config.outline.matmul_params()] * count
    work = Work.from_lengths(config, [length])
    params = [
        _mixer_params(config, index) + _network_params(config, index) for index in range(count)
    ]
    indexer = int(_indexer_flops(config, work)) // config.num_layers
    core_macs = _core_macs(config, work)[:count]
    return [
        2 * (length * param + macs) + indexer for param, macs in zip(params, core_macs, strict=True)
    ]


def core_attention_flops(config: DecoderConfig, work: Work) -> float:
    """FLOPs of all layers' attention scores and of their products with values, and those with
    states token by token, in one forward pass."""
    return 2.0 * sum(_core_macs(config, work))


def matrix_parameters(config: DecoderConfig) -> int:
    """Matmul parameters that each token uses: projections, MLPs and head.

    In MoE layers these are the selected experts, the shared experts and the router.
    """
    return sum(_matmul_params(config, part) for part in PARTS)


def pairs_per_token(config: DecoderConfig) -> int:
    """How many squared tokens of a document cost as much as all other work for one token. It weighs
    the quadratic cost of attention when the costs of rows and documents are compared.

    Causal attention costs half of the squared document length. In a layer with a sliding window or
    with chunks it costs a constant per token, which is the same in all longer documents and so
    counts as work per token. The result is a whole number, so that costs, and any order by cost,
    are the same on every machine.
    """
    state_macs = len(config.linear_layers) * config.linear.state_macs if config.linear else 0
    per_token = 6 * (matrix_parameters(config) + state_macs)
    local = len(config.local_layers)
    per_token += 6 * _pair_features(config) * local * _local_keys(config)
    return max(1, round(per_token / flops_per_pair(config)))


def flops_per_pair(config: DecoderConfig) -> int:
    """FLOPs of attention for one squared token of a document, in a forward and backward pass."""
    full = 6 * _pair_features(config.layer_kinds[-1])
    full *= config.softmax_layers - len(config.local_layers)
    # With sliding windows in every layer no cost is quadratic.
    return (full + 2 * _index_features(config)) // 2 or 1


def _local_keys(config: DecoderConfig) -> int:
    # The keys of a token in layers with a sliding window or an indexer, at most, or with chunks, on
    # average.
    if config.most_keys is not None:
        return config.most_keys
    return 0 if config.attention_chunk is None else (config.attention_chunk + 1) // 2


def _matmul_params(config: DecoderConfig, part: Part) -> int:
    width = config.hidden_size
    if part == "head":
        return width * config.vocab_size * (1 + config.num_mtp_layers)
    if isinstance(config, AutoModelConfig):
        return config.outline.matmul_params() if part == "network" else 0
    if part == "attention":
        return sum(_mixer_params(config, layer) for layer in range(config.num_layers))
    networks = sum(_network_params(config, layer) for layer in range(config.num_layers))
    return networks + 2 * width * width * config.num_mtp_layers


def _network_params(config: DecoderConfig, layer: int) -> int:
    # Parameters of a layer's MLP, or of its router and the experts of one token.
    if not config.has_mlp(layer):
        return 0
    width, matrices = config.hidden_size, 3 if config.gated else 2
    experts = config.layer_experts(layer)
    if experts is None:
        return matrices * width * config.intermediate_size
    chosen = experts.experts_per_token * experts.intermediate_size
    # Shared experts, router, gate and the projections around latent experts: each has D inputs or
    # outputs for every token.
    around = experts.shared_intermediate_size * matrices + experts.num_experts + experts.shared_gate
    around += 2 * experts.latent_size
    return matrices * (experts.latent_size or width) * chosen + width * around


def _mixer_params(config: DecoderConfig, layer: int) -> int:
    if config.layer_mixer(layer) is None:
        return 0
    width = config.hidden_size
    if config.linear and layer in config.linear_layers:
        return config.linear.matmul_params(width)
    if config.latent:
        shapes = config.latent.shapes(width, config.num_attention_heads).items()
        return sum(_matrix_size(shape) for name, shape in shapes if not name.startswith("indexer."))
    own = config.of_layer(layer)
    return width * (sum(own.qkv_features.values()) + own.num_attention_heads * own.head_dim)


def _matrix_size(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if len(shape) == 2 else 0


def _index_features(config: DecoderConfig) -> int:
    # Features of a query's index scores with a key, in all layers.
    indexer = config.latent.indexer if config.latent else None
    return indexer.heads * indexer.head_dim * config.num_layers if indexer else 0


def _indexer_flops(config: DecoderConfig, work: Work) -> float:
    # FLOPs of indexers in one forward pass. They have no backward pass, but for the loss that
    # trains them, which is not counted.
    if not config.latent or not config.latent.indexer:
        return 0.0
    shapes = config.latent.shapes(config.hidden_size, config.num_attention_heads).items()
    matrices = sum(_matrix_size(shape) for name, shape in shapes if name.startswith("indexer."))
    projected = matrices * config.num_layers * work.tokens
    return 2.0 * (projected + _index_features(config) * work.attention_pairs)


def _matmul_macs(config: DecoderConfig, work: Work, part: Part) -> int:
    return _matmul_params(config, part) * (work.logits if part == "head" else work.tokens)


def _pair_features(config: DecoderConfig) -> int:
    # Features of a query's scores with a key and of its values, over all heads.
    return config.num_attention_heads * (config.head_dim + config.value_dim)


def _core_macs(config: DecoderConfig, work: Work) -> list[int]:
    # Multiplications of each layer's attention, or states, without projections.
    macs: list[int] = []
    for layer in range(config.num_layers):
        if config.linear and layer in config.linear_layers:
            macs.append(config.linear.state_macs * work.tokens)
        elif config.layer_mixer(layer) is None:
            macs.append(0)
        else:
            is_local = layer in config.local_layers
            pairs = work.local_pairs if is_local else work.attention_pairs
            macs.append(_pair_features(config if is_local else config.layer_kinds[-1]) * pairs)
    return macs
