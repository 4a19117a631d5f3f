"""What a decoder's tokens cost in floating-point operations, and in pairs of tokens.

A product of [T, n] and [n, m] is 2 T n m operations. A step does a forward pass, the gradient of
each product's input, which costs as much, and that of its matrix, which costs as much again where
the matrix learns. What is computed a second time to save memory does not count: it is no progress.
Nor does what is no product (norms, activations, softmax), a share of a hundredth or less. After
Chowdhery et al. 2022, "PaLM", appendix B, but for pairs of tokens that do not see each other, which
are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.models.decoder_config import DecoderConfig

Part = Literal["attention", "network", "head"]
"""Of a decoder: the layers' attention with its projections, their feed-forward networks or
experts, and what makes logits."""

PARTS: tuple[Part, ...] = ("attention", "network", "head")


@dataclass(frozen=True)
class Work:
    """The tokens of some documents, and how many pairs of them there are to compare."""

    tokens: int
    """Padding left out."""
    pairs: int
    """Tokens and those of their own document that they see where nothing but the future is hidden;
    themselves too."""
    window_pairs: int
    """The same in a layer whose attention sees a window."""
    logits: int
    """Tokens whose logits are computed: those that are trained."""

    @classmethod
    def of(
        cls, config: DecoderConfig, lengths: Iterable[int], *, logits: int | None = None
    ) -> "Work":
        """Of documents with these lengths. `logits` left out: all tokens are trained."""
        tokens = pairs = window_pairs = 0
        window = config.sliding_window
        for length in lengths:
            tokens += length
            pairs += length * (length + 1) // 2
            if window is not None:
                full = min(length, window)
                window_pairs += full * (full + 1) // 2 + (length - full) * window
        return cls(tokens, pairs, window_pairs, tokens if logits is None else logits)

    @classmethod
    def of_sums(
        cls, config: DecoderConfig, tokens: int, squares: int, *, logits: int | None = None
    ) -> "Work":
        """Of documents with so many tokens and so large a sum of squared lengths.

        Under a window it is an estimate: every token is taken to see a whole window where documents
        could fill it, which is too much by less than half a window's square a document.
        """
        pairs = (squares + tokens) // 2
        window = config.sliding_window
        window_pairs = 0 if window is None else min(pairs, window * tokens)
        return cls(tokens, pairs, window_pairs, tokens if logits is None else logits)

    def __add__(self, other: "Work") -> "Work":
        """Both."""
        return Work(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.window_pairs + other.window_pairs,
            self.logits + other.logits,
        )


@dataclass(frozen=True)
class Learning:
    """Which of a decoder's matrices learn."""

    base: Literal["learns", "frozen"] = "learns"
    """The model's own. Frozen ones have no gradient, and pass on that of their outputs."""
    factors: int = 0
    """Parameters of the adapters beside them that a token is multiplied with; these learn."""
    head_factors: int = 0
    """Of these, those beside the head, which see only tokens whose logits are computed."""


EVERYTHING = Learning()


def step_flops(config: DecoderConfig, work: Work, *, learning: Learning = EVERYTHING) -> float:
    """Operations of one optimizer step over `work`: its forward and its backward pass.

    An adapter's factors cost three products like other matrices that learn; frozen matrices cost
    two. Of a frozen model's first layer the gradient of its input is counted, though nobody may
    ask for it: less than a hundredth of a large model's.
    """
    matrices = sum(_products(config, work, part) for part in PARTS)
    passes = 3 if learning.base == "learns" else 2
    inner = learning.factors - learning.head_factors
    factors = inner * work.tokens + learning.head_factors * work.logits
    return 2.0 * (passes * matrices + 3 * factors) + 3 * _comparing(config, work)


def forward_flops(config: DecoderConfig, work: Work, *, parts: Iterable[Part] = PARTS) -> float:
    """Operations of these parts in one forward pass: what recomputing them costs."""
    chosen = set(parts)
    products = 2.0 * sum(_products(config, work, part) for part in chosen)
    return products + (_comparing(config, work) if "attention" in chosen else 0)


def core_attention_flops(config: DecoderConfig, work: Work) -> float:
    """Operations of all layers' attention without its projections, in one forward pass."""
    return _comparing(config, work)


def matrix_parameters(config: DecoderConfig) -> int:
    """Parameters that every token is multiplied with: projections, feed-forward and output head.

    Of a layer's experts those count that a token goes to, as many as it chooses and the shared
    ones, and the router.
    """
    return sum(_parameters(config, part) for part in PARTS)


def pairs_per_token(config: DecoderConfig) -> int:
    """How many squared tokens of a document cost as much as all else costs one token: the rate at
    which rows of equal length, and of other documents, are told dear from cheap.

    Causal attention looks at half of a document's length squared, or in a layer with a window
    at as many tokens from each: to these a token costs the same in every document that is longer.
    A whole number, so that costs, and the order that follows from them, are the same on every
    machine.
    """
    sliding = len(config.sliding_layers)
    per_pair = 12 * config.num_attention_heads * config.head_dim
    per_token = 6 * matrix_parameters(config)
    if config.sliding_window is not None:
        per_token += per_pair * sliding * config.sliding_window
    # With windows in every layer nothing grows with the square.
    per_squared_token = per_pair * (config.num_hidden_layers - sliding) // 2 or 1
    return max(1, round(per_token / per_squared_token))


def _parameters(config: DecoderConfig, part: Part) -> int:
    """Matrix parameters of a part that one token is multiplied with."""
    width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    if part == "head":
        return width * config.vocab_size
    if part == "attention":
        return config.num_hidden_layers * width * (sum(config.qkv_parts.values()) + inner)
    networks = 0
    for layer in range(config.num_hidden_layers):
        features, choices = config.intermediate_size, 0
        if experts := config.experts_of(layer):
            features = experts.experts_per_token * experts.width + experts.shared_width
            choices = experts.num_experts
        networks += width * ((3 if config.gated else 2) * features + choices)
    return networks


def _products(config: DecoderConfig, work: Work, part: Part) -> int:
    """Multiplications of a part's matrices with tokens."""
    return _parameters(config, part) * (work.logits if part == "head" else work.tokens)


def _comparing(config: DecoderConfig, work: Work) -> float:
    """Operations of all layers' scores and of the values they weigh, in one forward pass."""
    sliding = len(config.sliding_layers)
    features = config.num_attention_heads * config.head_dim
    full = config.num_hidden_layers - sliding
    return 4.0 * features * (full * work.pairs + sliding * work.window_pairs)
