"""A tiny config of the same architecture: every kind of layer once, every size small.

What a model class computes does not depend on its sizes, so a property that is checked on the tiny
model (documents packed or apart, the head, names in checkpoints) holds for the model itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.models.automodel.media.tiny_media import MELS, fit_tokens, shrink_audio, shrink_images

# Layers of a tiny model, if more kinds of layers are not needed.
MAX_LAYERS = 6

MAX_POSITIONS = 256

_NAMES_BY_SIZE: Mapping[int, str] = {
    64: """
        hidden_size d_model n_embd embedding_dim dim index_topk lru_width embedding_size
        word_embed_proj_dim
    """,
    96: """
        intermediate_size ffn_dim d_inner n_inner dff dim_ff ffn_hidden_size encoder_ffn_dim
        decoder_ffn_dim feed_forward_size emb_dim intermediate_size_mlp dense_intermediate_size
        prefix_dense_intermediate_size
    """,
    32: """
        moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
        moe_shared_expert_intermediate_size expert_ffn_hidden_size moe_latent_size mamba_d_head
        mamba_head_dim
    """,
    4: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
        attention_heads swa_num_attention_heads linear_num_value_heads linear_num_heads
        mamba_n_heads num_query_groups num_experts n_routed_experts num_local_experts
        moe_num_experts sliding_window window_size local_attention attention_window_size
        sliding_window_size attention_chunk_size keep_window_size index_n_heads mamba_num_heads
    """,
    2: """
        linear_num_key_heads num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k
        n_groups n_group num_expert_group mamba_expand eos_token_id
    """,
    16: """
        head_dim swa_head_dim global_head_dim kv_channels dim_head d_head attention_head_size
        v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim
        index_head_dim query_pre_attn_scalar kv_lora_rank o_lora_rank hc_lowrank mamba_d_state
        state_size ssm_state_size
    """,
    8: """
        qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank mamba_chunk_size
        chunk_size time_step_rank mamba_dt_rank
    """,
    24: "q_lora_rank",
    MAX_POSITIONS: """
        max_position_embeddings n_positions max_seq_len context_length max_target_positions
        model_max_length
    """,
    320: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    1: "mamba_ngroups topk_group n_shared_experts bos_token_id",
    128: "mamba_d_ssm",
    0: "pad_token_id",
}
# Sizes by their names in transformers' configs. Windows are shorter than the documents of a check.
SIZES: Mapping[str, int] = {
    name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()
}

LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_blocks",
    "num_global_layers",
    "depth",
)
KEY_VALUE_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "kv_n_heads")
# Pairs of sizes of which the first stays equal to the second.
EQUAL = (
    ("num_key_value_heads", "num_attention_heads"),
    ("head_dim", "qk_rope_head_dim"),
    ("head_dim", "qk_head_dim"),
)

# The layers that attend to images.
CROSS_ATTENDING = "cross_attention_layers"

# The share of a head that is rotated.
ROTATED = "partial_rotary_factor"

# The number of last layers that use keys and values of earlier ones.
SHARING = "num_kv_shared_layers"

# Fields of configs of images.
MARKS = ("vision_config", "image_size", "num_embeddings")

# Values of single layers, by layer index.
PER_LAYER_CONFIG = "per_layer_config"

# Number of dense layers before the first one with experts.
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def shrink(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config (`to_dict`) with small sizes, and one layer of each kind."""
    small = _shrink(values)
    fit_tokens(small)
    return small


def _shrink(values: Mapping[str, Any]) -> dict[str, Any]:
    small = {key: value for key, value in values.items() if key not in ("id2label", "label2id")}
    count = next((values[name] for name in LAYER_COUNTS if _is_size(values.get(name))), 0)
    layers = _kinds_of_layers(values, count)
    for name, value in values.items():
        if name == PER_LAYER_CONFIG and isinstance(value, Mapping):
            own = {int(layer): entry for layer, entry in value.items()}
            small[name] = {
                str(index): _shrink(own[layer])
                for index, layer in enumerate(layers)
                if layer in own
            }
        elif _is_per_layer(value, count):
            small[name] = [value[layer] for layer in layers]
        elif name == CROSS_ATTENDING and value:
            small[name] = [len(layers) - 1]
        elif name == SHARING and value:
            small[name] = len(layers) // 2
        elif isinstance(value, Mapping) and name.endswith("_config"):
            small[name] = _shrink(value)
        elif isinstance(value, int) and _is_size(value):
            small[name] = _small_size(name, value, len(layers) if value == count else MAX_LAYERS)
    if any("patch_size" in name or name in MARKS for name in values):
        shrink_images(values, small, len(layers))
    if MELS in values:
        shrink_audio(values, small)
    _keep_relations(values, small)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), Mapping):
            small[name] = _shrink_rope(small[name], values, small)
    return small


def _small_size(name: str, value: int, layers: int) -> int:
    if name in LAYER_COUNTS:
        return min(value, layers)
    if name in KEY_VALUE_HEADS:
        return 1 if value == 1 else 2
    if name in DENSE_FIRST:
        return 1
    return min(value, SIZES.get(name, value))


def _shrink_rope(
    rope: Mapping[str, Any], values: Mapping[str, Any], small: Mapping[str, Any]
) -> dict[str, Any]:
    # Rotary parameters, of one kind or by kind, whose sections of axes (M-RoPE) and share of a head
    # fit the small sizes.
    small_rope = {
        name: _shrink_rope(parameter, values, small)
        if isinstance(parameter, Mapping)
        else parameter
        for name, parameter in rope.items()
    }
    sections = rope.get("mrope_section")
    if sections and (width := _head_width(values)):
        total = sum(sections) * _head_width(small) // width
        sizes = [size * total // sum(sections) for size in sections]
        for axis in range(total - sum(sizes)):
            sizes[axis] += 1
        small_rope["mrope_section"] = sizes
    rotated, width = values.get("qk_rope_head_dim"), values.get("head_dim")
    if rotated and width and rope.get(ROTATED) == rotated / width:
        small_rope[ROTATED] = small["qk_rope_head_dim"] / small["head_dim"]
    return small_rope


def _head_width(values: Mapping[str, Any]) -> int:
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if values.get("head_dim"):
        return values["head_dim"]
    return width // heads if width and heads else 0


def _keep_relations(values: Mapping[str, Any], small: dict[str, Any]) -> None:
    def have(*names: str) -> bool:
        return all(_is_size(values.get(name)) for name in names)

    if have("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    for name, equal_name in EQUAL:
        if have(name, equal_name) and values[name] == values[equal_name]:
            small[name] = small[equal_name]
    if have("hidden_size", "num_attention_heads", "head_dim") and (
        values["num_attention_heads"] * values["head_dim"] == values["hidden_size"]
    ):
        small["head_dim"] = small["hidden_size"] // small["num_attention_heads"]
    if have("mamba_d_ssm", "mamba_n_heads", "mamba_d_head"):
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    elif have("mamba_expand", "hidden_size", "mamba_n_heads", "mamba_d_head"):
        width = small["hidden_size"] * small["mamba_expand"]
        small["mamba_d_head"] = width // small["mamba_n_heads"]
    if have("expand", "num_heads", "head_dim"):
        small["head_dim"] = small["hidden_size"] * values["expand"] // small["num_heads"]


def _is_size(value: Any) -> bool:
    # bool is a subclass of int.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and count > 1 and len(value) == count


def _kinds_of_layers(values: Mapping[str, Any], count: int) -> Sequence[int]:
    # The first layer of each kind, by the per-layer lists of the config; at least two layers.
    per_layer = [value for value in values.values() if _is_per_layer(value, count)]
    first: dict[str, int] = {}
    for layer in range(count):
        first.setdefault(repr([value[layer] for value in per_layer]), layer)
    chosen = [*first.values()][:MAX_LAYERS]
    other_layers = (layer for layer in range(count) if layer not in chosen)
    while len(chosen) < min(2, count):
        chosen.append(next(other_layers))
    if values.get(SHARING):
        # Every kind once before the layers that share, and once among them.
        return [*sorted(chosen), *sorted(chosen)]
    return sorted(chosen)
