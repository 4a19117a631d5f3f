"""Names of parameters that several files know. No torch: what is asked of names and shapes alone is
answered before anything heavy is imported."""

HEAD_WEIGHT = "lm_head.weight"
EMBEDDING_WEIGHT = "model.embed_tokens.weight"
POSITIONS_WEIGHT = "model.embed_positions.weight"

SELECTION_BIAS = "e_score_correction_bias"
"""Of a router: what is added to experts' scores for choosing among them, and not to weights."""
