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
    """How many squared tokens of a document cost as much as the matrices cost one token.

    A step does 6 floating-point operations per token and matrix parameter, and 12 per layer, head
    feature and pair of tokens that attend to each other (Chowdhery et al. 2022, "PaLM", appendix
    B). Causal attention looks at half of a document's length squared. A whole number, so that
    costs, and the order that follows from them, are the same on every machine.
    """
    per_squared_token = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return max(1, round(6 * matrix_parameters(config) / per_squared_token))
