"""The rows that the heads of attention have in the weights of queries, keys and values."""

import re
from collections.abc import Callable

from penstock.models.decoder_config import DecoderConfig

HeadRows = Callable[[str], tuple[int, ...]]
"""The name of a parameter to the numbers of rows of the matrices that its tensors consist of, which
repeat until the last row: those of a head. Empty: a tensor is one matrix."""

_ATTENTION_LAYER = re.compile(r"\.layers\.(\d+)\.self_attn\.(\w+)\.(?:weight|bias)$")


def attention_layer(name: str) -> tuple[int, str] | None:
    """The layer number and the linear layer ("q_proj") of a parameter; None for others."""
    match = _ATTENTION_LAYER.search(name)
    return (int(match[1]), match[2]) if match else None


def whole_matrices(name: str) -> tuple[int, ...]:
    """No tensor is split."""
    del name
    return ()


def split_by_heads(config: DecoderConfig) -> HeadRows:
    """Each head's queries, keys and values are a matrix."""

    def head_rows(name: str) -> tuple[int, ...]:
        number, layer = attention_layer(name) or (0, "")
        if latent := config.latent:
            of_latent = {"kv_b_proj": (latent.nope_dim, latent.v_dim)}
            of_latent |= dict.fromkeys(("q_proj", "q_b_proj"), (latent.qk_dim,))
            return of_latent.get(layer, ())
        if layer in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            return (config.of_layer(number).head_dim,)
        return ()

    return head_rows
