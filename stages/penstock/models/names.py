"""Parameter names that several modules use. No torch, so that names and shapes can be used before
anything slow is imported."""

HEAD_WEIGHT = "lm_head.weight"
EMBEDDING_WEIGHT = "model.embed_tokens.weight"
POSITIONS_WEIGHT = "model.embed_positions.weight"

SELECTION_BIAS = "e_score_correction_bias"
"""A router's bias that is added to scores for selecting experts, but not to their weights."""

LAYER_SCALAR = "layer_scalar"
"""A number that a layer's output is multiplied by, without a gradient."""

SELF_ATTN, LINEAR_ATTN = "self_attn", "linear_attn"
"""A layer's token mixer: softmax attention, and linear attention."""

INDEXER = "indexer"
"""What selects tokens in sparse attention."""

IMAGE_EXPERTS = "image"
"""In a MoE layer, the module with the router and the experts of the tokens of images."""
