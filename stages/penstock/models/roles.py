"""The words a model uses to say what its parts are. Pure data: no devices, no torch.

A family publishes a table from module pattern to role. Whoever cuts a model into pieces, puts
adapters on it or picks optimizers for its matrices reads that table; models never mention them.
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
    "model.layers.*.self_attn.[qkv]_proj": Role.WIDEN,
    "model.layers.*.self_attn.qkv_proj": Role.WIDEN,
    "model.layers.*.self_attn.o_proj": Role.NARROW,
    "model.layers.*.mlp.gate_proj": Role.WIDEN,
    "model.layers.*.mlp.up_proj": Role.WIDEN,
    "model.layers.*.mlp.down_proj": Role.NARROW,
    "lm_head": Role.HEAD,
}
"""The roles of `decoder.Decoder`'s modules, whichever family gives it its numbers."""
