"""Parallel styles and shard units of modules. Pure data: no devices, no torch.

A family publishes a table from module pattern to parallel style, and one from linear layer to the
unit in which its features can be sharded. Tensor parallelism, adapters and the selection of
optimizers read these tables; the model code does not use them.
"""

from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase


class ParallelStyle(Enum):
    """The role of a module in tensor and expert parallelism."""

    VOCAB = "vocab"
    """Embedding table; rows are tokens (vocab-parallel)."""
    COLWISE = "widen"
    """Linear layer whose output heads or features are independent (column-parallel)."""
    ROWWISE = "narrow"
    """Linear layer whose input heads or features are independent (row-parallel)."""
    REPLICATED = "replicated"
    """Linear layer that every rank computes in full. Within a region of which it has some heads,
    each rank has a partial sum of its gradient."""
    HEAD = "head"
    """Linear layer onto the vocabulary."""
    PER_HEAD = "per head"
    """Its own parameters, not those of its submodules, have one value per query head, or per value
    head of linear attention."""
    SPLIT_NORM = "split norm"
    """Norm over the features of a column-parallel layer; its weight is split as they are."""
    CHANNELS = "channels"
    """Depthwise convolution of the features of a column-parallel layer."""
    ROUTER = "router"
    """Scores experts for tokens; in full precision on every rank."""
    EXPERTS = "experts"
    """Independent MLPs; dimension 0 of each parameter is the expert."""


class ShardUnit(Enum):
    """The smallest block of features that can be computed independently."""

    QUERY_HEAD = "query head"
    """The features of a query head, or of its output; each group of query heads shares one key
    head."""
    KEY_HEAD = "key head"
    """`head_dim` features of keys or values."""
    FEATURE = "feature"
    """One feature of an MLP; MLPs may differ in their number of features."""
    TOKEN = "token"
    """One vocabulary entry."""


Roles = Mapping[str, ParallelStyle]


def find_parallel_style(name: str, roles: Roles) -> ParallelStyle | None:
    """The parallel style of the module called `name`, or None.

    Raises:
        ValueError: several patterns match; a module has one style.
    """
    matches = [role for pattern, role in roles.items() if fnmatchcase(name, pattern)]
    if len(matches) > 1:
        raise ValueError(f"{name} matches {len(matches)} patterns; a module has one role")
    return matches[0] if matches else None


DECODER_ROLES: Roles = {
    "model.embed_tokens": ParallelStyle.VOCAB,
    "model.layers.*.self_attn": ParallelStyle.PER_HEAD,
    "model.layers.*.self_attn.[qkv]_proj": ParallelStyle.COLWISE,
    "model.layers.*.self_attn.qkv_proj": ParallelStyle.COLWISE,
    "model.layers.*.self_attn.o_proj": ParallelStyle.ROWWISE,
    "model.layers.*.mlp.gate_proj": ParallelStyle.COLWISE,
    "model.layers.*.mlp.up_proj": ParallelStyle.COLWISE,
    "model.layers.*.mlp.gate_up_proj": ParallelStyle.COLWISE,
    "model.layers.*.mlp.down_proj": ParallelStyle.ROWWISE,
    "model.layers.*.mlp.gate": ParallelStyle.ROUTER,
    "model.layers.*.mlp.experts": ParallelStyle.EXPERTS,
    "model.layers.*.mlp.image.gate": ParallelStyle.ROUTER,
    "model.layers.*.mlp.image.experts": ParallelStyle.EXPERTS,
    "model.layers.*.mlp.shared_*.gate_proj": ParallelStyle.COLWISE,
    "model.layers.*.mlp.shared_*.up_proj": ParallelStyle.COLWISE,
    "model.layers.*.mlp.shared_*.gate_up_proj": ParallelStyle.COLWISE,
    "model.layers.*.mlp.shared_*.down_proj": ParallelStyle.ROWWISE,
    "model.layers.*.mlp.shared_expert_gate": ParallelStyle.ROUTER,
    "model.layers.*.mlp.fc[12]_latent_proj": ParallelStyle.REPLICATED,
    "model.layers.*.eh_proj": ParallelStyle.REPLICATED,
    "lm_head": ParallelStyle.HEAD,
}
"""Parallel styles of `decoder.Decoder`'s modules, for all families."""

LINEAR_ATTENTION_ROLES: Roles = {
    **DECODER_ROLES,
    "model.layers.*.linear_attn": ParallelStyle.PER_HEAD,
    "model.layers.*.linear_attn.in_proj*": ParallelStyle.COLWISE,
    "model.layers.*.linear_attn.[fg]_a_proj": ParallelStyle.REPLICATED,
    "model.layers.*.linear_attn.[fg]_b_proj": ParallelStyle.COLWISE,
    "model.layers.*.linear_attn.conv*": ParallelStyle.CHANNELS,
    "model.layers.*.linear_attn.out_proj": ParallelStyle.ROWWISE,
}
"""The same for families with layers of linear attention."""

MAMBA_ROLES: Roles = {
    **LINEAR_ATTENTION_ROLES,
    "model.layers.*.linear_attn.norm": ParallelStyle.SPLIT_NORM,
}
"""The same for families with Mamba-2 layers."""

SPLIT_QK_NORM_ROLES: Roles = {
    **DECODER_ROLES,
    "model.layers.*.self_attn.[qk]_norm": ParallelStyle.SPLIT_NORM,
}
"""The same for families whose QK norm is over whole projections."""

# What the rows (in a `ROWWISE` layer: the columns) of a checkpoint's layer are, by the last part of
# its name; the same for all families so far. Layers of token mixers with a state have
# `StateLayerConfig.heads`.
DECODER_SHARD_UNITS: Mapping[str, ShardUnit] = {
    "embed_tokens": ShardUnit.TOKEN,
    "embeddings": ShardUnit.TOKEN,
    "q_proj": ShardUnit.QUERY_HEAD,
    "k_proj": ShardUnit.KEY_HEAD,
    "v_proj": ShardUnit.KEY_HEAD,
    "o_proj": ShardUnit.QUERY_HEAD,
    "q_b_proj": ShardUnit.QUERY_HEAD,
    "kv_b_proj": ShardUnit.QUERY_HEAD,
    "gate_proj": ShardUnit.FEATURE,
    "up_proj": ShardUnit.FEATURE,
    "down_proj": ShardUnit.FEATURE,
    "lm_head": ShardUnit.TOKEN,
    "q_norm": ShardUnit.QUERY_HEAD,
    "k_norm": ShardUnit.KEY_HEAD,
    "out_proj": ShardUnit.QUERY_HEAD,
    "fc1": ShardUnit.FEATURE,
    "fc2": ShardUnit.FEATURE,
    "input_linear": ShardUnit.FEATURE,
    "output_linear": ShardUnit.FEATURE,
    "w1": ShardUnit.FEATURE,
    "w2": ShardUnit.FEATURE,
    "w3": ShardUnit.FEATURE,
}


def shard_unit(layer: str) -> ShardUnit:
    """The unit of a checkpoint's layer outside of token mixers with a state, by the last part of
    its name."""
    return DECODER_SHARD_UNITS[layer.rpartition(".")[2]]
