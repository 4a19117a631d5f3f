"""What a token costs a model beside what a pair of tokens costs: the exchange rate between the two.

A decoder multiplies every token with its matrices, and attention compares every token with those
before it in its document. Rows of equal length therefore cost different amounts of work.
"""

from penstock.models.shape import DecoderConfig


def matrix_parameters(config: DecoderConfig) -> int:
    """Parameters that every token is multiplied with: projections, feed-forward and output head.

    Of a layer's experts those count that a token goes to, as many as it chooses and the shared
    ones, and the router.
    """
    width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    attention = width * sum(config.qkv_parts.values()) + inner * width
    networks = 0
    for layer in range(config.num_hidden_layers):
        features, choices = config.intermediate_size, 0
        if experts := config.experts_of(layer):
            features = experts.experts_per_token * experts.width + experts.shared_width
            choices = experts.num_experts
        networks += width * (3 * features + choices)
    return config.num_hidden_layers * attention + networks + width * config.vocab_size


def pairs_per_token(config: DecoderConfig) -> int:
    """How many squared tokens of a document cost as much as all else costs one token.

    A step does 6 floating-point operations per token and matrix parameter, and 12 per layer, head
    feature and pair of tokens that attend to each other (Chowdhery et al. 2022, "PaLM", appendix
    B). Causal attention looks at half of a document's length squared, or in a layer with a window
    at as many tokens from each: to these a token costs the same in every document that is longer.
    A whole number, so that costs, and the order that follows from them, are the same on every
    machine.
    """
    sliding = len(config.sliding_layers)
    features = config.num_attention_heads * config.head_dim
    per_token = 6 * matrix_parameters(config)
    if config.sliding_window is not None:
        per_token += 12 * sliding * features * config.sliding_window
    # With windows in every layer nothing grows with the square.
    per_squared_token = 6 * (config.num_hidden_layers - sliding) * features or 1
    return max(1, round(per_token / per_squared_token))
