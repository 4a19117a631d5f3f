"""Decoder hyperparameters: everything that determines tensor shapes and the computation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from penstock.models.latent_config import IndexerConfig, LatentAttentionConfig
from penstock.models.mtp_config import MTPConfig
from penstock.models.names import LINEAR_ATTN, SELF_ATTN
from penstock.models.size_limits import MAX_LAYERS
from penstock.models.state_layer_config import StateLayerConfig, config_error, require_sizes

POSITIVE_INT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
EXPERT_POSITIVE_INT_FIELDS = (
    "num_experts",
    "experts_per_token",
    "intermediate_size",
    "num_groups",
    "groups_per_token",
)

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""RoPE types whose frequencies depend on sequence length. The length is that of each document, so
packed documents give the same results as separate ones."""

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["best_two", "best"]
"""What the score of a group of experts is: the sum of its two best, or the best."""
RotaryPairs = Literal["halves", "neighbours"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`relu2` is squared ReLU. `relu` and `relu2` are only for MLPs without a gate."""
Norm = Literal["rms", "rms_1p", "layer", "layer_1p", "layer_unbiased", "layer_plain"]
"""RMSNorm, or with the factor 1 + weight; LayerNorm with a bias, with a bias and the factor
1 + weight, without a bias, or without a weight either."""
QKNorm = Literal["head", "projection"]
"""What QK norm takes the mean square over: a head, or all heads of queries or of keys."""


@dataclass(frozen=True)
class ExpertNames:
    """Checkpoint names in a MoE layer, relative to the layer."""

    block: str = "mlp"
    """The module that has the router and the experts."""
    module: str = "mlp"
    """What transformers' model calls that module, where experts are not stacked."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """The matrices of an expert, in `experts.<number>`; without a gate there are two."""
    gate_up_stack: str = ""
    down_stack: str = ""
    """The tensors that stack the matrices of all experts, [experts, outputs, inputs], in families
    whose checkpoints have no tensor for each expert; empty in the others."""
    selection_bias: str = "gate.e_score_correction_bias"
    router: str = "gate"
    """The router."""
    image_router: str = ""
    image_selection_bias: str = ""
    """Those of the tokens of images, where these have experts of their own."""
    shared: str = "shared_experts"
    """The MLP of the shared experts."""
    shared_is_beside: bool = False
    """Whether it is beside the block, where dense layers have their MLP."""
    shared_gate: str = "shared_expert_gate"
    """The gate of the shared experts' output, if any."""
    latent_in: str = "fc1_latent_proj"
    latent_out: str = "fc2_latent_proj"
    """The projections before and after experts of a `latent_size`."""
    known_to_peft: bool = True
    """Whether PEFT takes a target with the name of an expert's layer for all experts. It does in
    families whose checkpoints transformers maps like those of another family."""


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names of a decoder without experts."""

    backbone: str = "model"
    module_backbone: str = ""
    """What transformers' model calls the backbone, if checkpoints call it otherwise."""
    embed: str = "embed_tokens"
    """The token embedding."""
    norm: str = "norm"
    """The final norm."""
    attention: str = "self_attn"
    """Softmax attention."""
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_output_norm: str = "post_self_attn_layernorm"
    mlp_output_norm: str = "post_mlp_layernorm"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    o_proj: str = "self_attn.o_proj"
    gate_proj: str = "mlp.gate_proj"
    gate_up_proj: str = "mlp.gate_up_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"
    earlier: tuple[tuple[str, str], ...] = ()
    """Parts of names in earlier files, and what they are called today."""

    def today(self, stored: str) -> str:
        """Today's name of a tensor in a file."""
        for before, after in self.earlier:
            stored = stored.replace(before, after)
        return stored

    @property
    def embedding(self) -> str:
        return f"{self.backbone}.{self.embed}.weight"

    @property
    def positions(self) -> str:
        return f"{self.backbone}.embed_positions.weight"


@dataclass(frozen=True)
class LearnedPositions:
    """A learned position embedding, used instead of RoPE."""

    rows: int
    first: int
    """The row of a document's first token."""


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with their position, after RoPE:
    `1 + beta * log(1 + floor(position / length))`, as in Llama 4 and Ministral 3."""

    beta: float
    length: int
    """The document length up to which the factor is 1."""
    first: int = 0
    """The position of a document's first token."""
    only_without_rope: bool = False
    """Whether only `no_rope_layers` have it."""

    def __post_init__(self) -> None:
        _require_numbers(self)


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of keys and values in some layers, as in Gemma 4."""

    head_dim: int
    num_key_value_heads: int
    keys_are_values: bool = False


@dataclass(frozen=True)
class ClampedGate:
    """Experts as in gpt-oss: `clamp(gate) * sigmoid(alpha * clamp(gate)) * (clamp(up) + 1)` as
    activation, biases on all matrices, stacks of matrices [inputs, outputs], and interleaved gate
    and up features."""

    alpha: float
    limit: float
    """Gates are clamped to at most this, and up features to between it and its negative."""

    def __post_init__(self) -> None:
        _require_numbers(self)


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a decoder's MoE layers, and their routing."""

    layers: tuple[int, ...]
    """Indices of the MoE layers; the others are dense."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Intermediate size of each expert."""
    image_intermediate_size: int = 0
    """Intermediate size of each expert of the tokens of images, which then have a router and as
    many experts of their own; 0: all tokens have the same."""
    latent_size: int = 0
    """Features of what the experts read and write, between two projections; 0: `hidden_size`."""
    shared_intermediate_size: int = 0
    """Intermediate size of all shared experts together, which are one MLP; 0: none."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by a gate, which is the sigmoid of a
    linear layer with one output."""
    scoring: Scoring = "softmax"
    """Router scores: `softmax` over all experts, or `sigmoid` of each."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    norm_eps: float = 1e-20
    """What is added to that sum."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are split into `num_groups` consecutive groups of equal size. A token selects among
    the experts of its best `groups_per_token` groups."""
    group_score: GroupScore = "best_two"
    scale: float = 1.0
    """Final factor of the expert weights (routed_scaling_factor)."""
    router_bias: bool = False
    """Whether the router has a bias, which affects both selection and weights."""
    selection_bias: tuple[int, ...] = ()
    """Shape of the bias that affects selection but not weights; empty: none."""
    fp32_router: bool = False
    """Whether checkpoints store the router's weight in fp32, whatever the dtype of the others."""
    aux_loss_coef: float = 0.0
    """Default coefficient of the load-balancing loss."""
    scales_inputs: bool = False
    """Whether a token's weight multiplies the input of its expert, not the output. One expert per
    token."""
    transposed: bool = False
    """Whether checkpoints have the stacked matrices as [experts, inputs, outputs]."""
    adaptable: bool = True
    """Whether experts can have adapters that PEFT reads."""
    clamped: ClampedGate | None = None
    """None: as `DecoderConfig.gated` and `activation` say, without biases."""
    names: ExpertNames = field(default_factory=ExpertNames)

    def __post_init__(self) -> None:
        _require_numbers(self)
        require_sizes(self, {name: name for name in EXPERT_POSITIVE_INT_FIELDS})
        for experts, features in (
            ("shared experts", self.shared_intermediate_size),
            ("latent experts", self.latent_size),
            ("experts of images", self.image_intermediate_size),
        ):
            if not isinstance(features, int) or features < 0:
                raise config_error(f"{experts} have {features!r} features; it is 0 or more")
        if self.num_experts % self.num_groups:
            raise config_error(
                f"{self.num_experts} experts are not a multiple of their groups ({self.num_groups})"
            )
        if self.groups_per_token > self.num_groups:
            raise config_error(
                f"a token chooses {self.groups_per_token} of {self.num_groups} groups of experts"
            )
        num_candidates = self.num_experts // self.num_groups * self.groups_per_token
        if self.experts_per_token > num_candidates:
            raise config_error(
                f"a token chooses {self.experts_per_token} of {num_candidates} experts"
            )
        if self.scales_inputs and self.experts_per_token > 1:
            raise config_error(
                f"a token chooses {self.experts_per_token} experts, and weights that multiply "
                "inputs are of one"
            )
        has_pairs = self.num_experts // self.num_groups > 1
        if self.num_groups > 1 and self.group_score == "best_two" and not has_pairs:
            raise config_error(
                f"{self.num_groups} groups of {self.num_experts} experts have one each, and groups "
                "are scored by their two best experts"
            )

    # cached_property writes to __dict__, which a frozen dataclass allows.
    @cached_property
    def of_images(self) -> "ExpertsConfig | None":
        """The experts of the tokens of images, without shared ones; None if all tokens have the
        same."""
        if not self.image_intermediate_size:
            return None
        router, bias = self.names.image_router, self.names.image_selection_bias
        return replace(
            self,
            intermediate_size=self.image_intermediate_size,
            image_intermediate_size=0,
            shared_intermediate_size=0,
            names=replace(self.names, router=router, selection_bias=bias),
        )

    @property
    def is_transposed(self) -> bool:
        return self.transposed or self.clamped is not None

    @property
    def is_stacked(self) -> bool:
        return bool(self.names.gate_up_stack)


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer. Names are those of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    full_attention_heads: HeadSizes | None = None
    """Those of layers without a sliding window, whose RoPE is `rope_parameters`; None: as in all
    layers. See `of_layer`."""
    keys_are_values: bool = False
    """Whether k_proj gives the values too, without QK norm and RoPE; there is no v_proj then."""
    norm: Norm = "rms"
    """Norms of the residual stream. QK norm is always RMSNorm, with `rms_1p` of that kind too."""
    input_norms: bool = True
    """Whether attention and MLP read a normalized residual stream."""
    parallel_block: bool = False
    """Whether attention and MLP read the same normalized residual stream (parallel block), with one
    norm in each layer."""
    output_norms: bool = False
    """Whether the outputs of attention and MLP are normalized before they are added to it."""
    rms_norm_eps: float = 1e-6
    """Epsilon of norms of either kind: added to the variance or the mean square."""
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0}
    )
    """As in transformers 5: rope_type, rope_theta and the parameters of the type."""
    sliding_rope_parameters: Mapping[str, Any] | None = None
    """Those of `sliding_layers`; None: as in all layers."""
    no_rope_layers: tuple[int, ...] = ()
    """Indices of the layers without position encoding (NoPE)."""
    learned_positions: LearnedPositions | None = None
    """None: RoPE."""
    rope_pairs: RotaryPairs = "halves"
    """Which features RoPE rotates together: `halves` (GPT-NeoX style) each with the one half a head
    further, or `neighbours` (interleaved, GPT-J style)."""
    rope_fp32: bool = False
    """Whether RoPE is computed in fp32, or in the dtype of the residual stream."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    """Whether q_proj, k_proj and v_proj have biases."""
    o_bias: bool = False
    """Whether o_proj has a bias."""
    mlp_bias: bool = False
    gated: bool = True
    """Whether MLPs and experts are gated, `down(act(gate(x)) * up(x))`, or not,
    `down(act(up(x)))`."""
    activation: Activation = "silu"
    """Activation of MLPs, and of experts without a gate; `gelu` is exact, `gelu_tanh` the tanh
    approximation."""
    qk_norm: bool = False
    """Whether queries and keys are normalized (QK norm)."""
    qk_norm_over: QKNorm = "head"
    qk_norm_after_rope: bool = False
    """Whether QK norm comes after RoPE, or before."""
    qk_unit_norm: bool = False
    """Whether queries and keys of each head are divided by their root mean square after RoPE, in
    layers with RoPE."""
    value_norm: bool = False
    """Whether the values of each head are divided by their root mean square."""
    attention_scale: float | None = None
    """Factor of attention scores; None: `head_dim ** -0.5`."""
    attention_soft_cap: float | None = None
    """Soft cap of attention scores, `cap * tanh(score / cap)`."""
    query_scale: QueryScale | None = None
    output_gate: bool = False
    """Whether the output of each head is multiplied by the sigmoid of a gate, which q_proj computes
    after the head's query."""
    attention_sinks: bool = False
    """Whether each query head has a trained attention sink logit."""
    sliding_window: int | None = None
    """Sliding window of `sliding_layers`: the number of tokens that a token attends to, including
    itself."""
    sliding_layers: tuple[int, ...] = ()
    """Indices of the layers with sliding-window attention; the others have full attention."""
    attention_chunk: int | None = None
    """Tokens of the chunks into which `chunked_layers` cut each document: a token attends to those
    before it in its chunk."""
    chunked_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    rounds_embedding_scale: bool = False
    """Whether that factor is of the embedding table alone: rounded to its dtype, and not a factor
    of image features."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    layer_scalars: bool = False
    """Whether each layer's output is multiplied by a number of the checkpoint, which is not
    trained."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_soft_cap: float | None = None
    """Soft cap of the logits, after the factor."""
    fused_qkv: bool = False
    """Whether checkpoints have q_proj, k_proj and v_proj as one layer, `qkv_proj`."""
    fused_gate_up: bool = False
    """Whether checkpoints have gate_proj and up_proj as one layer, `gate_up_proj`."""
    initializer_range: float = 0.02
    latent: LatentAttentionConfig | None = None
    """Multi-head latent attention, with as many key heads as query heads and `head_dim` features of
    queries and keys; None: grouped-query attention."""
    linear: StateLayerConfig | None = None
    linear_layers: tuple[int, ...] = ()
    """Indices of the layers with linear attention, or another token mixer with a state, as `linear`
    defines it; the others have softmax attention."""
    linear_input_norms: bool = False
    """Whether these layers have norms of their inputs and none of their outputs, whatever
    `input_norms` and `output_norms` are."""
    without_mixer: tuple[int, ...] = ()
    """Indices of the layers without a token mixer: an MLP or experts alone."""
    without_mlp: tuple[int, ...] = ()
    """Indices of the layers without an MLP and experts: a token mixer alone."""
    experts: ExpertsConfig | None = None
    mtp: MTPConfig | None = None
    """The layers that predict further tokens, which come after the others; None where they are not
    trained."""
    names: TensorNames = field(default_factory=TensorNames)

    def __post_init__(self) -> None:
        _require_numbers(self)
        require_sizes(self, {name: name for name in POSITIVE_INT_FIELDS})
        if self.num_hidden_layers > MAX_LAYERS:
            raise config_error(
                f"num_hidden_layers is {self.num_hidden_layers:,}; it must be at most "
                f"{MAX_LAYERS:,}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise config_error(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of its "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        # Not strict: where all layers share their RoPE there is one mapping, and there are always
        # two sizes.
        for parameters, head_dim in zip(
            self.all_rope_parameters, self.rope_head_dims, strict=False
        ):
            self._check_rope(parameters, head_dim)
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if (cap := getattr(self, name)) is not None and cap <= 0:
                raise config_error(f"{name} is {cap}; it must be more than 0, or null")
        if self.chunked_layers and (self.attention_chunk is None or self.attention_chunk < 1):
            raise config_error(
                f"attention_chunk_size is {self.attention_chunk}, and {len(self.chunked_layers)} "
                "layers use it; it is a number of tokens, 1 or more"
            )
        if self.sliding_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise config_error(
                f"sliding_window is {self.sliding_window}, and {len(self.sliding_layers)} layers "
                "use it; it is a number of tokens, 1 or more"
            )

    def _check_rope(self, parameters: Mapping[str, Any], head_dim: int) -> None:
        rotary_dim = _rotary_dim(parameters, head_dim)
        if rotary_dim % 2 or not rotary_dim:
            share = "" if rotary_dim == head_dim else f", of which {rotary_dim} are rotated"
            raise config_error(
                f"head_dim is {head_dim}{share}; RoPE rotates features in pairs, so their "
                "number must be even"
            )
        for factors in ("short_factor", "long_factor"):
            count = len(parameters.get(factors) or ())
            if parameters["rope_type"] == "longrope" and count != rotary_dim // 2:
                raise config_error(
                    f"{factors} (rope_parameters) has {count} numbers, and {rotary_dim // 2} "
                    "pairs of features are rotated"
                )

    @property
    def num_layers(self) -> int:
        """All layers, those that predict further tokens included."""
        return self.num_hidden_layers + self.num_mtp_layers

    @property
    def num_mtp_layers(self) -> int:
        """The trained layers that predict further tokens."""
        return self.mtp.num_layers if self.mtp else 0

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.latent.v_dim if self.latent else self.head_dim

    @property
    def query_features(self) -> int:
        """Features of a head in q_proj: its query, and the gate of its output if it has one."""
        return self.head_dim * (2 if self.output_gate else 1)

    @property
    def attention_dim(self) -> int:
        """Features of a head in attention, of which some may be zeros that are appended."""
        return self.latent.padded_dim if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of rotated features of each head, from the first on."""
        return _rotary_dim(self.rope_parameters, self.rope_head_dims[0])

    @property
    def all_rope_parameters(self) -> tuple[Mapping[str, Any], ...]:
        sliding = self.sliding_rope_parameters
        return (self.rope_parameters,) if sliding is None else (self.rope_parameters, sliding)

    @property
    def rope_head_dims(self) -> tuple[int, int]:
        """Features of a head that RoPE is defined on, in the layers with each of
        `all_rope_parameters`: all, or those that latent attention has for it."""
        if self.latent:
            return self.latent.rope_dim, self.latent.rope_dim
        full = self.full_attention_heads
        return (self.head_dim if full is None else full.head_dim, self.head_dim)

    def of_layer(self, layer: int) -> "DecoderConfig":
        """This config with the head sizes of one layer."""
        if self.full_attention_heads is None or layer in self.sliding_layers:
            return self
        return self._of_full_attention

    @property
    def layer_kinds(self) -> "tuple[DecoderConfig, ...]":
        """The configs of layers with different head sizes: one, or two."""
        return (self,) if self.full_attention_heads is None else (self, self._of_full_attention)

    @cached_property
    def _of_full_attention(self) -> "DecoderConfig":
        heads = self.full_attention_heads
        assert heads is not None
        # None, so that `of_layer` of the result is the result itself.
        return replace(self, full_attention_heads=None, **asdict(heads))

    @property
    def length_dependent_rope(self) -> str | None:
        """The RoPE type whose angles depend on document lengths, if any layer has one."""
        kinds = (parameters["rope_type"] for parameters in self.all_rope_parameters)
        return next((kind for kind in kinds if kind in LENGTH_DEPENDENT_ROPE), None)

    @property
    def rope_invariant_up_to(self) -> float:
        """The document length up to which RoPE angles do not depend on the length; infinite if they
        never do."""
        # Up to these lengths transformers' formulas take the frequencies of training.
        limits = {"dynamic": self.max_position_embeddings}
        return min(
            parameters["original_max_position_embeddings"]
            if parameters["rope_type"] == "longrope"
            else limits.get(parameters["rope_type"], math.inf)
            for parameters in self.all_rope_parameters
        )

    @property
    def qkv_features(self) -> Mapping[str, int]:
        """Output features of q_proj, k_proj and, if there is one, v_proj, in the order in which
        they are fused. Those of one layer are `of_layer(layer).qkv_features`."""
        keys = self.num_key_value_heads * self.head_dim
        queries = {"q_proj": self.num_attention_heads * self.query_features, "k_proj": keys}
        return queries if self.keys_are_values else {**queries, "v_proj": keys}

    @property
    def norm_parameters(self) -> tuple[str, ...]:
        unusual = {"layer": ("weight", "bias"), "layer_1p": ("weight", "bias"), "layer_plain": ()}
        return unusual.get(self.norm, ("weight",))

    @property
    def is_adaptable(self) -> bool:
        # Whether layers can have adapters: transformers names the backbone as the model does.
        backbone = self.names.module_backbone or self.names.backbone
        return backbone == TensorNames().backbone

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def cacheable_length(self) -> float:
        """The document length up to which keys and values of earlier tokens can be kept."""
        # Within one chunk a token attends to all before it, which is what a cache holds.
        chunk = self.attention_chunk if self.chunked_layers else None
        return min(self.rope_invariant_up_to, math.inf if chunk is None else chunk)

    @property
    def local_layers(self) -> tuple[int, ...]:
        """Indices of the layers where a token attends to some earlier ones only: those of a window
        or a chunk, or those that an indexer selects."""
        if self.indexer:
            return tuple(range(self.num_layers))
        return self.sliding_layers or self.chunked_layers

    @property
    def indexer(self) -> IndexerConfig | None:
        """The indexer of sparse attention, in all layers; None without one."""
        return self.latent.indexer if self.latent else None

    @property
    def most_keys(self) -> int | None:
        """Tokens that a token attends to at most in `local_layers`; None without a limit, or with
        chunks."""
        return self.indexer.top_k if self.indexer else self.sliding_window

    @property
    def whole_past(self) -> str | None:
        """What needs all of a document's past, so that no token's can be masked further; None:
        nothing does."""
        if self.linear_layers:
            return "linear attention"
        if self.chunked_layers:
            return "attention in chunks"
        return "sparse attention" if self.indexer else None

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of this layer; None: full attention."""
        return self.sliding_window if layer in self.sliding_layers else None

    def scales_queries(self, layer: int) -> bool:
        """Whether this layer has `query_scale`."""
        scale = self.query_scale
        return scale is not None and (not scale.only_without_rope or layer in self.no_rope_layers)

    def layer_mixer(self, layer: int) -> str | None:
        """The module of this layer where tokens see one another; None for a layer without."""
        if layer in self.without_mixer:
            return None
        return LINEAR_ATTN if layer in self.linear_layers else SELF_ATTN

    def layer_norms(self, layer: int) -> tuple[bool, bool]:
        """Whether this layer has norms of the inputs of its two parts, and of their outputs."""
        if self.linear_input_norms and layer in self.linear_layers:
            return True, False
        return self.input_norms, self.output_norms

    def has_mlp(self, layer: int) -> bool:
        return layer not in self.without_mlp

    @property
    def softmax_layers(self) -> int:
        return self.num_layers - len(self.linear_layers) - len(self.without_mixer)

    def layer_experts(self, layer: int) -> ExpertsConfig | None:
        """The experts of this layer; None if it is dense."""
        return self.experts if self.experts and layer in self.experts.layers else None


def _rotary_dim(parameters: Mapping[str, Any], head_dim: int) -> int:
    if parameters["rope_type"] == "proportional":
        return head_dim  # features beyond the share have angles of 0
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def _require_numbers(config: Any) -> None:
    for config_field in fields(config):
        value = getattr(config, config_field.name)
        # bool is a subclass of int.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_absent = value is None and config_field.type == (float | None)
        if config_field.type in (float, float | None) and not (is_number or is_absent):
            raise config_error(f"{config_field.name} is {value!r}, which is not a number")
