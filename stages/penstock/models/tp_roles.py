"""The words a model uses to say what its parts are. Pure data: no devices, no torch.

A family publishes a table from module pattern to role, and one from linear layer to the grain that
its features come in. Whoever cuts a model into pieces, puts adapters on it or picks optimizers for
its matrices reads these tables; models never mention them.
"""

from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase


class ParallelStyle(Enum):
    """What a module is for."""

    VOCAB = "vocab"
    """Embedding table: rows are tokens."""
    WIDEN = "widen"
    """Linear into heads or features that are independent of each other."""
    NARROW = "narrow"
    """Linear out of independent heads or features."""
    HEAD = "head"
    """Linear onto the vocabulary."""
    PER_HEAD = "per head"
    """Its own parameters, beside those of its parts, have one number for each query head."""
    ROUTER = "router"
    """Chooses experts for tokens."""
    EXPERTS = "experts"
    """Networks that are independent of each other; dimension 0 of each parameter is networks."""


class ShardUnit(Enum):
    """The smallest run of a layer's features that is computed with by itself."""

    QUERY_HEAD = "query head"
    """`head_dim` features; each group of query heads attends to one key head."""
    KEY_HEAD = "key head"
    """`head_dim` features of keys, or of the values that go with them."""
    FEATURE = "feature"
    """One feature of a feed-forward network; how many there are differs from network to network."""
    TOKEN = "token"
    """One entry of the vocabulary."""


Roles = Mapping[str, ParallelStyle]


def find_parallel_style(name: str, roles: Roles) -> ParallelStyle | None:
    """The role of the module called `name`, or None.

    Raises:
        ValueError: if several patterns match; a module has one role.
    """
    matches = [role for pattern, role in roles.items() if fnmatchcase(name, pattern)]
    if len(matches) > 1:
        raise ValueError(f"{name} matches {len(matches)} patterns; a module has one role")
    return matches[0] if matches else None


DECODER_ROLES: Roles = {
    "model.embed_tokens": ParallelStyle.VOCAB,
    "model.layers.*.self_attn": ParallelStyle.PER_HEAD,
    "model.layers.*.self_attn.[qkv]_proj": ParallelStyle.WIDEN,
    "model.layers.*.self_attn.qkv_proj": ParallelStyle.WIDEN,
    "model.layers.*.self_attn.o_proj": ParallelStyle.NARROW,
    "model.layers.*.mlp.gate_proj": ParallelStyle.WIDEN,
    "model.layers.*.mlp.up_proj": ParallelStyle.WIDEN,
    "model.layers.*.mlp.down_proj": ParallelStyle.NARROW,
    "model.layers.*.mlp.gate": ParallelStyle.ROUTER,
    "model.layers.*.mlp.experts": ParallelStyle.EXPERTS,
    "model.layers.*.mlp.shared_experts.gate_proj": ParallelStyle.WIDEN,
    "model.layers.*.mlp.shared_experts.up_proj": ParallelStyle.WIDEN,
    "model.layers.*.mlp.shared_experts.down_proj": ParallelStyle.NARROW,
    "lm_head": ParallelStyle.HEAD,
}
"""The roles of `decoder.Decoder`'s modules, whichever family gives it its numbers."""

DECODER_GRAINS: Mapping[str, ShardUnit] = {
    "embed_tokens": ShardUnit.TOKEN,
    "q_proj": ShardUnit.QUERY_HEAD,
    "k_proj": ShardUnit.KEY_HEAD,
    "v_proj": ShardUnit.KEY_HEAD,
    "o_proj": ShardUnit.QUERY_HEAD,
    "gate_proj": ShardUnit.FEATURE,
    "up_proj": ShardUnit.FEATURE,
    "down_proj": ShardUnit.FEATURE,
    "lm_head": ShardUnit.TOKEN,
    "out_proj": ShardUnit.QUERY_HEAD,
    "fc1": ShardUnit.FEATURE,
    "fc2": ShardUnit.FEATURE,
}
"""What the rows (those of a `NARROW` layer: the columns) of a checkpoint's layer are, by the last
part of its name; the same for every family so far."""
