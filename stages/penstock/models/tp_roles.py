"""The words a model uses to say what its parts are. Pure data: no devices, no torch.

A family publishes a table from module pattern to role, and one from linear layer to the grain that
its features come in. Whoever cuts a model into pieces, puts adapters on it or picks optimizers for
its matrices reads these tables; models never mention them.
"""

from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase


class Role(Enum):
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


class Grain(Enum):
    """The smallest run of a layer's features that is computed with by itself."""

    QUERY_HEAD = "query head"
    """`head_dim` features; each group of query heads attends to one key head."""
    KEY_HEAD = "key head"
    """`head_dim` features of keys, or of the values that go with them."""
    FEATURE = "feature"
    """One feature of a feed-forward network; how many there are differs from network to network."""
    TOKEN = "token"
    """One entry of the vocabulary."""


Roles = Mapping[str, Role]


def role_of(name: str, roles: Roles) -> Role | None:
    """The role of the module called `name`, or None.

    Raises:
        ValueError: if several patterns match; a module has one role.
    """
    matches = [role for pattern, role in roles.items() if fnmatchcase(name, pattern)]
    if len(matches) > 1:
        raise ValueError(f"{name} matches {len(matches)} patterns; a module has one role")
    return matches[0] if matches else None


DECODER_ROLES: Roles = {
    "model.embed_tokens": Role.VOCAB,
    "model.layers.*.self_attn": Role.PER_HEAD,
    "model.layers.*.self_attn.[qkv]_proj": Role.WIDEN,
    "model.layers.*.self_attn.qkv_proj": Role.WIDEN,
    "model.layers.*.self_attn.o_proj": Role.NARROW,
    "model.layers.*.mlp.gate_proj": Role.WIDEN,
    "model.layers.*.mlp.up_proj": Role.WIDEN,
    "model.layers.*.mlp.down_proj": Role.NARROW,
    "model.layers.*.mlp.gate": Role.ROUTER,
    "model.layers.*.mlp.experts": Role.EXPERTS,
    "model.layers.*.mlp.shared_experts.gate_proj": Role.WIDEN,
    "model.layers.*.mlp.shared_experts.up_proj": Role.WIDEN,
    "model.layers.*.mlp.shared_experts.down_proj": Role.NARROW,
    "lm_head": Role.HEAD,
}
"""The roles of `decoder.Decoder`'s modules, whichever family gives it its numbers."""

DECODER_GRAINS: Mapping[str, Grain] = {
    "embed_tokens": Grain.TOKEN,
    "q_proj": Grain.QUERY_HEAD,
    "k_proj": Grain.KEY_HEAD,
    "v_proj": Grain.KEY_HEAD,
    "o_proj": Grain.QUERY_HEAD,
    "gate_proj": Grain.FEATURE,
    "up_proj": Grain.FEATURE,
    "down_proj": Grain.FEATURE,
    "lm_head": Grain.TOKEN,
    "out_proj": Grain.QUERY_HEAD,
    "fc1": Grain.FEATURE,
    "fc2": Grain.FEATURE,
}
"""What the rows (those of a `NARROW` layer: the columns) of a checkpoint's layer are, by the last
part of its name; the same for every family so far."""
