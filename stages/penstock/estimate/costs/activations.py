"""Activation memory: tensors saved for backward by each layer, in bytes per micro-batch. No torch.

The saved tensors follow the modules in `penstock.models.layers`, line by line, as Korthikanti et
al. 2022, "Reducing activation recomputation in large transformer models", count them.
"""

from dataclasses import dataclass

from penstock.adapters.match_targets import TargetLayer
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.latent_config import LatentAttentionConfig
from penstock.models.state_layer_config import StateLayerConfig
from penstock.models.weights import LAYERS

FP32 = INT32 = 4
QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
GATE_UP = ("gate_proj", "up_proj", "gate_up_proj")
"""Layers that read one input, by the names that checkpoints have for them."""
PLAIN = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "o_proj")

LONG_DOCUMENT = 1024
"""The longest document of a row, where its length matters and is not known."""


@dataclass(frozen=True)
class Layer:
    """Activation memory of one layer."""

    stream: float
    """Saved outside attention and MLP: the residual stream and the inputs of norms."""
    attention: float
    """Saved within attention."""
    network: float
    """Saved within the MLP or the experts."""
    gradients: float
    """Peak of activation gradients at the start of the layer's backward pass."""
    entry: float
    """The layer's input only (full activation checkpointing)."""

    @property
    def whole(self) -> float:
        """Saved tensors without activation checkpointing."""
        return self.stream + self.attention + self.network


def select_layer(sharded: ShardedModel, number: int) -> Layer:
    """Activation memory of the layer with this number."""
    config, degrees, width = sharded.config, sharded.degrees, sharded.compute_bytes
    tokens = sharded.tokens
    if isinstance(config, AutoModelConfig) and (counted := _counted(sharded, config, number)):
        return counted
    tensor = degrees.tensor
    split = tensor if sharded.run.train.sequence_parallel else 1
    stream_row = config.hidden_size * width
    saved_inputs = _SavedInputs(sharded, number)
    # Inputs of norms, with one fp32 statistic per row; and those of attention and network, normed
    # or not, if a trainable linear layer reads them.
    normed = tokens * stream_row
    has_mixer, has_mlp = config.layer_mixer(number) is not None, config.has_mlp(number)
    parts = has_mixer + has_mlp
    input_norms, output_norms = config.layer_norms(number)
    norms = input_norms * (1 if config.parallel_block else parts) + output_norms * parts
    stream = norms * (tokens / split) * (stream_row + FP32)
    if number >= config.num_hidden_layers:
        # Two norms, their outputs side by side, and the norm of the output.
        stream += 3 * (tokens / split) * (stream_row + FP32) + 2 * (tokens / split) * stream_row
    attention = network = gradients = 0.0
    if config.linear and number in config.linear_layers:
        attention = normed * saved_inputs.num_copies(*config.linear.input_layers)
        attention += _state_layer(sharded, saved_inputs, config.linear)
    elif has_mixer:
        attention = normed * saved_inputs.num_copies(*QKV)
        attention += _attention(sharded, saved_inputs, config.of_layer(number))
    experts = config.layer_experts(number)
    if experts:
        network = _experts(sharded, experts, saved_inputs)
        gradients = _expert_gradients(sharded, experts)
    elif has_mlp:
        features = config.intermediate_size / tensor
        network = normed * saved_inputs.num_copies(*GATE_UP)
        network += _network(sharded, saved_inputs, features)
        gradients = tokens * width * (2 * features + 2 * config.hidden_size)
    return Layer(stream, attention, network, gradients, tokens / split * stream_row)


def _counted(sharded: ShardedModel, config: AutoModelConfig, number: int) -> Layer | None:
    """A layer of a transformers model as its code was counted; None if it could not be. That its
    frozen linear layers save no input is not counted."""
    width, tokens = sharded.compute_bytes, sharded.tokens
    saved = config.outline.saved.get("float32" if width == FP32 else "bfloat16")
    if not saved:
        return None
    per_token, pair = saved[min(number, len(saved) - 1)]
    document = min(sharded.run.data.row_length, LONG_DOCUMENT)
    saved_bytes = tokens * (per_token + pair * document)
    prefix = f"{LAYERS}{number}."
    adapters = sum(adapter.native.startswith(prefix) for adapter in sharded.model.adapters)
    lora = sharded.run.lora.lora_rank * width * tokens * adapters
    gradients = tokens * width * 2 * (config.intermediate_size + config.hidden_size)
    return Layer(saved_bytes + lora, 0.0, 0.0, gradients, tokens * config.hidden_size * width)


def _layer_name(adapter: TargetLayer) -> str:
    """The last part of a layer's name: the model's where all families have the same layer."""
    stored, native = (name.rpartition(".")[2] for name in (adapter.name, adapter.native))
    return native if native in PLAIN else stored


class _SavedInputs:
    """Which linear layers save their input: those whose weight or adapter is trainable."""

    def __init__(self, sharded: ShardedModel, layer: int) -> None:
        self._sharded = sharded
        self._all_trainable = not sharded.run.lora.enable_lora
        self._adapted = {
            _layer_name(adapter)
            for adapter in sharded.model.adapters
            if adapter.native.startswith(f"{LAYERS}{layer}.")
        }

    def num_copies(self, *parts: str) -> int:
        """Number of saved copies of an input that these linear layers share."""
        return int(self._all_trainable or any(part in self._adapted for part in parts))

    def lora_a_bytes(self, *parts: str) -> float:
        """Bytes of the outputs of LoRA A."""
        count = sum(part in self._adapted for part in parts)
        sharded = self._sharded
        return count * sharded.tokens * sharded.run.lora.lora_rank * sharded.compute_bytes


def _attention_bytes(sharded: ShardedModel) -> int:
    """Bytes per element of saved q, k, v and attention output."""
    if sharded.kind == "cpu":
        # CPU attention computes in fp32 and saves q, k, v in fp32; long documents, which are
        # chunked and save less, are counted like short ones.
        return FP32
    return 2 if sharded.run.model.attention_cast_bf16 else sharded.compute_bytes


def _attention(sharded: ShardedModel, saved_inputs: _SavedInputs, config: DecoderConfig) -> float:
    if config.latent:
        return _latent_attention(sharded, saved_inputs, config.latent)
    width, tokens, tensor = sharded.compute_bytes, sharded.tokens, sharded.degrees.tensor
    heads = config.num_attention_heads / tensor
    keys = max(1.0, config.num_key_value_heads / tensor)
    row, within = config.head_dim * tokens, _attention_bytes(sharded)
    # q, output, k and v, and the log-sum-exp of each row, from which the backward pass recomputes
    # the scores (Dao et al. 2022, "FlashAttention").
    saved = row * within * 2 * (heads + keys) + tokens * heads * FP32
    projected = row * width * (heads + 2 * keys)
    if config.qk_norm:
        saved += projected + tokens * FP32 * (heads + keys)
    if sharded.kind == "cuda" and (sharded.run.model.merge_qkv or config.fused_qkv):
        # v is a view of the fused qkv output, so saving v keeps all of that output.
        saved += (0 if config.qk_norm else projected) - row * width * keys
    if config.output_gate:
        # The gate, its sigmoid, and the output that it multiplies, which o_proj reads.
        saved += row * width * heads * (2 + saved_inputs.num_copies("o_proj"))
    if sharded.kind == "cpu" and within != width:
        # o_proj reads (and saves) a cast copy of the attention output.
        saved += row * width * heads * saved_inputs.num_copies("o_proj")
    return saved + saved_inputs.lora_a_bytes(*QKV, "o_proj")


def _latent_attention(
    sharded: ShardedModel, saved_inputs: _SavedInputs, latent: LatentAttentionConfig
) -> float:
    """Saved: the latent vectors, which norms read, with a statistic per row, and their normed
    values where the next layer trains; q, k, v and the output of attention, padded to one width, or
    absorbed; the input of o_proj, a copy where the output is padded; the tokens that an indexer
    selects."""
    config, width, tokens = sharded.config, sharded.compute_bytes, sharded.tokens
    heads = config.num_attention_heads / sharded.degrees.tensor
    within = _attention_bytes(sharded)
    # Keys are gathered from the ranks that share a document.
    sequence_tokens = tokens * sharded.degrees.ring * sharded.degrees.ulysses
    selects = latent.indexer is not None and sequence_tokens > latent.indexer.top_k
    head = 4 * latent.padded_dim * within
    if selects and sharded.kind == "cuda":
        # Queries before and after they are absorbed, and the sums of latent vectors.
        head = (latent.nope_dim + 2 * latent.kv_rank + latent.rope_dim) * width
    saved = tokens * heads * (head + FP32)
    if latent.indexer and selects:
        saved += tokens * latent.indexer.top_k * INT32
        saved += (sequence_tokens - tokens) * (latent.kv_rank + latent.rope_dim) * width
    saved += tokens * ((latent.kv_rank + latent.rope_dim) * width + FP32)
    saved += tokens * latent.kv_rank * width * saved_inputs.num_copies("kv_b_proj")
    if latent.q_rank is not None:
        saved += tokens * (latent.q_rank * width + FP32)
        saved += tokens * latent.q_rank * width * saved_inputs.num_copies("q_b_proj")
    if within != width or latent.padded_dim != latent.v_dim:
        saved += tokens * heads * latent.v_dim * width * saved_inputs.num_copies("o_proj")
    return saved + saved_inputs.lora_a_bytes(*QKV, "q_b_proj", "kv_b_proj", "o_proj")


def _state_layer(
    sharded: ShardedModel, saved_inputs: _SavedInputs, linear: StateLayerConfig
) -> float:
    """Saved: what the kind of layer says, and the inputs of linear layers that train."""
    width, tokens = sharded.compute_bytes, sharded.tokens
    tensor, context = sharded.degrees.tensor, sharded.degrees.context
    output, features = linear.output_layer
    saved, inner = linear.saved, linear.inner_layers
    split = saved.computed + features * saved_inputs.num_copies(output)
    total = tokens * (split * width + saved.fp32 * FP32) / tensor
    # Ranks that share heads, but not evenly, have some of them twice, or empty ones.
    even = linear.exchanged_by_rank(tensor, 1) / context
    total *= linear.exchanged_by_rank(tensor, context) / even
    for layer, inputs in inner.items():
        total += tokens * inputs * width * saved_inputs.num_copies(layer)
    return total + saved_inputs.lora_a_bytes(*linear.input_layers, *inner, output)


def _saved_per_feature(sharded: ShardedModel, saved_inputs: _SavedInputs) -> int:
    """Saved values of an intermediate feature: gate and up outputs; on CPUs the activated gate;
    their product if down_proj trains. Without a gate: the up output, and the activated one if
    down_proj trains."""
    activated = 1 + sharded.config.gated * (1 + (sharded.kind == "cpu"))
    return activated + saved_inputs.num_copies("down_proj")


def _network(sharded: ShardedModel, saved_inputs: _SavedInputs, features: float) -> float:
    per_feature = _saved_per_feature(sharded, saved_inputs)
    saved = sharded.tokens * features * sharded.compute_bytes * per_feature
    return saved + saved_inputs.lora_a_bytes(*GATE_UP, "down_proj")


def _experts(sharded: ShardedModel, experts: ExpertsConfig, saved_inputs: _SavedInputs) -> float:
    """Saved by balanced experts: the permuted token copies, if a trainable linear layer reads them;
    `_saved_per_feature`; the expert outputs. Routers save fp32 scores and, if trainable, their
    input. A gate of the shared experts saves their output, and the projection after latent ones its
    input, if it trains."""
    config, tokens, width = sharded.config, sharded.tokens, sharded.compute_bytes
    rows, features = tokens * experts.experts_per_token, experts.latent_size or config.hidden_size
    latent_inputs = saved_inputs.num_copies(experts.names.latent_out)
    saved = tokens * experts.latent_size * width * latent_inputs
    per_feature = _saved_per_feature(sharded, saved_inputs)
    saved += per_feature * width * tokens * experts.shared_intermediate_size
    lora_a_bytes = saved_inputs.lora_a_bytes("gate_proj", "up_proj", "down_proj")
    saved += lora_a_bytes * experts.experts_per_token
    row = rows * width * features
    if _is_fused(sharded, lora_a_bytes):
        # Only gate and up features of rows, and the tokens.
        saved += width * (2 * rows * experts.intermediate_size + tokens * features)
    else:
        saved += row * saved_inputs.num_copies("gate_proj", "up_proj")
        saved += per_feature * width * rows * experts.intermediate_size
    if sharded.kind == "cpu":
        # PyTorch weights and sums expert outputs in fp32, and saves the permutation twice.
        # index_select saves 8 bytes of an index for each row, and masked_fill 1 of a mask.
        saved += rows * (FP32 * features + 2 * (8 + 1))
    elif not _is_fused(sharded, lora_a_bytes):
        saved += row
    saved += tokens * FP32 * (2 * experts.num_experts + 4 * experts.experts_per_token)
    # A router's matmul in fp32 saves the cast copy of its input.
    if saved_inputs.num_copies("gate") and not sharded.run.model.freeze_router:
        saved += tokens * config.hidden_size * (FP32 if sharded.run.model.router_fp32 else width)
    if experts.shared_intermediate_size:
        shared = saved_inputs.num_copies("gate_proj", "up_proj") + experts.shared_gate
        saved += tokens * width * config.hidden_size * shared
    return saved


def _is_fused(sharded: ShardedModel, lora_a_bytes: float) -> bool:
    # Whether `expert_mlp` computes the experts.
    run = sharded.run
    is_plain = not lora_a_bytes and not run.train.moe_checkpoint_method and sharded.config.gated
    return run.model.moe_implementation == "triton" and bool(is_plain)


def _expert_gradients(sharded: ShardedModel, experts: ExpertsConfig) -> float:
    """Gradients of the combined expert output: its own, and that of each token copy."""
    hidden_size, width = sharded.config.hidden_size, sharded.compute_bytes
    copy_bytes = experts.experts_per_token * (2 * FP32 if sharded.kind == "cpu" else width)
    copies = (experts.latent_size or hidden_size) * copy_bytes
    return sharded.tokens * (hidden_size * (width + FP32) + copies)
