"""What the layers of a model keep for the backward pass, in bytes of one micro-batch. No torch.

T tokens, D model width, N query heads, K key heads, H head width, F feed-forward width; each on one
rank. The list of what is kept follows the modules in `penstock.models.layers`, line by line.
"""

from dataclasses import dataclass

from penstock.costs.sharded_model import Cut
from penstock.models.decoder_config import ExpertsConfig

FP32 = 4


@dataclass(frozen=True)
class Layer:
    """One layer's share."""

    stream: float
    """What is kept outside of the two parts: the residual stream, and the norms' inputs."""
    attention: float
    """Within attention."""
    network: float
    """Within the feed-forward network or the experts."""
    gradients: float
    """The most that the backward pass holds beside what is kept, at its beginning."""
    entry: float
    """The layer's input alone."""

    @property
    def whole(self) -> float:
        """All that is kept where nothing is recomputed."""
        return self.stream + self.attention + self.network


def select_layer(cut: Cut, number: int) -> Layer:
    """The layer with this number."""
    config, degrees, width = cut.config, cut.degrees, cut.computes
    tokens = cut.tokens
    tensor = degrees.tensor
    split = tensor if cut.run.train.sequence_parallel else 1
    stream_row = config.hidden_size * width
    feeds = _Feeds(cut, number)
    # Two inputs of norms, with a number a row; and what the norms give, where a product that
    # learns reads it.
    normed = tokens * stream_row
    stream = 2 * (tokens / split) * (stream_row + FP32)
    attention = normed * feeds.copies("q_proj", "k_proj", "v_proj") + _attention(cut, feeds)
    experts = config.experts_of(number)
    if experts:
        network = _experts(cut, experts, feeds)
        gradients = _gradients_of_experts(cut, experts)
    else:
        features = config.intermediate_size / tensor
        network = normed * feeds.copies("gate_proj", "up_proj") + _network(cut, feeds, features)
        gradients = tokens * width * (2 * features + 2 * config.hidden_size)
    return Layer(stream, attention, network, gradients, tokens / split * stream_row)


class _Feeds:
    """Which of a layer's products keep their input: those whose matrix, or an adapter, learns."""

    def __init__(self, cut: Cut, layer: int) -> None:
        self._cut = cut
        self._all_learn = not cut.run.lora.enable_lora
        its = cut.model.adapters
        at = f"model.layers.{layer}."
        self._adapted = {one.name.rpartition(".")[2] for one in its if one.native.startswith(at)}

    def copies(self, *parts: str) -> int:
        """How often an input that these products share is kept."""
        count = sum(part in self._adapted for part in parts)
        if self._all_learn:
            return 1
        # Factors in fp32 beside autocast: each casts the input for itself.
        casts = not self._cut.is_sharded and self._cut.computes < FP32
        return count if casts else min(1, count)

    def low(self, *parts: str) -> float:
        """Bytes of what first factors give."""
        count = sum(part in self._adapted for part in parts)
        return count * self._cut.tokens * self._cut.run.lora.lora_rank * self._cut.computes


def _attention(cut: Cut, feeds: _Feeds) -> float:
    config, width, tokens = cut.config, cut.computes, cut.tokens
    tensor = cut.degrees.tensor
    heads = config.num_attention_heads / tensor
    keys = max(1.0, config.num_key_value_heads / tensor)
    row = config.head_dim * tokens
    within = 2 if cut.run.model.attention_cast_bf16 else width
    if cut.kind == "cpu":
        # PyTorch attends in fp32 there, and keeps what it attends to so; long documents, which go
        # by strips and keep less, are counted as short ones.
        within = FP32
    kept = row * within * 2 * (heads + keys) + tokens * heads * FP32
    projected = row * width * (heads + 2 * keys)
    if config.qk_norm:
        kept += projected + tokens * FP32 * (heads + keys)
    if cut.kind == "cuda" and cut.run.model.merge_qkv:
        # Values are a part of what was projected, which is there as long as they are.
        kept += (0 if config.qk_norm else projected) - row * width * keys
    if cut.kind == "cpu" and within != width:
        # What leads out of attention reads a copy of what it gave.
        kept += row * width * heads * feeds.copies("o_proj")
    return kept + feeds.low("q_proj", "k_proj", "v_proj", "o_proj")


def _network(cut: Cut, feeds: _Feeds, features: float) -> float:
    """Gate and up; on CPUs the activated gate; and their product where what leads out learns."""
    per_feature = (3 if cut.kind == "cpu" else 2) + feeds.copies("down_proj")
    kept = cut.tokens * features * cut.computes * per_feature
    return kept + feeds.low("gate_proj", "up_proj", "down_proj")


def _experts(cut: Cut, experts: ExpertsConfig, feeds: _Feeds) -> float:
    """Of experts that are as busy as each other: each token's copies, sorted, where a product that
    learns reads them; gate and up; their product likewise; what came of it. Routers keep scores in
    fp32, and what they learn from."""
    config, tokens, width = cut.config, cut.tokens, cut.computes
    rows = tokens * experts.experts_per_token
    row = rows * width * config.hidden_size
    kept = row * min(1, feeds.copies("gate_proj", "up_proj"))
    per_feature = (3 if cut.kind == "cpu" else 2) + min(1, feeds.copies("down_proj"))
    kept += per_feature * width * (rows * experts.width + tokens * experts.shared_width)
    kept += feeds.low("gate_proj", "up_proj", "down_proj") * experts.experts_per_token
    if cut.kind == "cpu":
        # PyTorch weighs and adds in fp32, and keeps twice which copy is where.
        kept += rows * (FP32 * config.hidden_size + 2 * (8 + 1))
    else:
        kept += row
    kept += tokens * FP32 * (2 * experts.num_experts + 4 * experts.experts_per_token)
    if feeds.copies("gate") and not cut.run.model.freeze_router:
        kept += tokens * config.hidden_size * (FP32 if cut.run.model.router_fp32 else width)
    if experts.shared_width:
        kept += tokens * width * config.hidden_size * feeds.copies("gate_proj", "up_proj")
    return kept


def _gradients_of_experts(cut: Cut, experts: ExpertsConfig) -> float:
    """Of the sum of what experts made: its own, and each copy's before any is multiplied."""
    config, width = cut.config, cut.computes
    copies = experts.experts_per_token * (2 * FP32 if cut.kind == "cpu" else width)
    return cut.tokens * config.hidden_size * (width + FP32 + copies)
