"""LoRA and QLoRA: low-rank adapters."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import PATH, ConfigSection
from penstock.config.schema.cache_key import (
    CacheKey,
    Keyed,
    KeyedByContent,
    KeyedUnlessDefault,
    Unkeyed,
)
from penstock.config.schema.effect import NativeOnly, NotWith, OnlyWith
from penstock.config.schema.quantization import GROUPS, QuantFormat, readable
from penstock.config.schema.served import Served

LORA = OnlyWith("lora.enable_lora", why="there are no adapters with {name}: {value}")
QLORA = OnlyWith("lora.enable_qlora", why="nothing is quantized with {name}: {value}")
NOISE = OnlyWith("lora.enable_aqn", why="no noise is added with {name}: {value}")
MERGED = OnlyWith(
    "lora.is_merged_in_training",
    words="a merge_lora_interval",
    why="adapters are never merged with merge_lora_interval: 0",
)


class LoraConfig(ConfigSection):
    """LoRA and QLoRA: low-rank adapters beside a frozen base model."""

    enable_lora: Annotated[
        Keyed[bool],
        Served(
            doc="Train LoRA adapters: many models share the base model. Otherwise all weights of "
            "one model at a time are trained."
        ),
    ] = False
    """Train LoRA adapters and freeze the base weights."""

    lora_rank: Annotated[
        Keyed[int],
        Served(
            default=32,
            doc="Maximum rank of an adapter, and the rank if a client does not request one.",
        ),
    ] = Field(default=16, gt=0)
    """Rank (r) of the adapters."""

    lora_alpha: Annotated[
        Keyed[int | float],
        Served(
            doc="LoRA alpha if a client does not request one: the output of an adapter is scaled"
            " by alpha / rank."
        ),
    ] = Field(default=16, gt=0)
    """LoRA alpha: the output of an adapter is scaled by alpha / rank."""

    use_rslora: Annotated[KeyedUnlessDefault[bool], LORA] = False
    """Rank-stabilized LoRA: scale by alpha / sqrt(rank), so that adapters of high rank learn as
    fast as those of low rank."""

    use_dora: Annotated[KeyedUnlessDefault[bool], LORA] = False
    """DoRA: train the magnitude (norm of each row) of an adapted weight separately from its
    direction."""

    lora_plus_ratio: Annotated[KeyedUnlessDefault[float], LORA] = Field(default=1.0, gt=0)
    """LoRA+: learning rate of the second factors (B) as a multiple of `train.lr`. Metrics show the
    learning rate of the other parameters, among which are the B of an embedding, whose A is
    initialized to zero."""

    lora_bias: Annotated[KeyedUnlessDefault[Literal["none", "all", "lora_only"]], LORA] = "none"
    """Biases that are trained too: `all` of the model, or those of layers with an adapter
    (`lora_only`)."""

    lora_dropout: KeyedUnlessDefault[float] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of an adapter's input features."""

    lora_target_modules: Annotated[
        Keyed[
            Annotated[
                Annotated[list[str], AfterValidator(readable)] | Literal["all-linear"] | None,
                Field(min_length=1),
            ]
        ],
        Served(),
    ] = None
    """Layers that get an adapter, by their names in the checkpoint or suffixes of these, for
    example `[q_proj, v_proj]`, by patterns in which `*` is any text (`layers.[0-3].*.q_proj`), or
    after `re:` by a regular expression of whole names, as PEFT's strings are.
    Experts have such names too: `gate_proj` matches every feed-forward network,
    `experts.*.gate_proj` only experts, `mlp.gate_proj` only networks without experts.
    `embed_tokens` and `lm_head` are allowed where they are not tied. `all-linear`: all linear
    layers except the LM head. Unset: all linear layers of the decoder blocks, with experts, without
    routers."""

    missing_targets: Unkeyed[Literal["refuse", "skip"]] = "refuse"
    """What becomes of items of `lora_target_modules` that name no layer of this model: an error, or
    with `skip` a line in the log, as PEFT passes over them. If none names a layer, it is an error
    either way."""

    init_adapter_path: Annotated[KeyedByContent[str | None], PATH, LORA] = None
    """Adapter to start from: a folder or hub id with `adapter_config.json`. Rank, alpha, targets
    and variant are read from it; if they are written here too, they must agree."""

    moe_shared_lora: Annotated[
        KeyedUnlessDefault[bool],
        LORA,
        NotWith(
            "lora.moe_hybrid_shared_lora",
            why="experts share complete adapters (moe_shared_lora) or one of the two factors"
            " (moe_hybrid_shared_lora)",
            instead="write only one of the two",
        ),
        Served(),
        NativeOnly("each expert has its own adapter here"),
    ] = False
    """Mixture of experts: all experts of a layer share one adapter for each of their matrices. An
    exported adapter has a copy for each expert."""

    moe_hybrid_shared_lora: Annotated[
        KeyedUnlessDefault[bool], LORA, Served(), NativeOnly("each expert has its own adapter here")
    ] = False
    """Mixture of experts: the experts of a layer share the factors that have the hidden size as a
    dimension: A of the gate and up projections and B of the down projection. The other factors are
    one per expert."""

    save_lora_only: Annotated[Unkeyed[bool], LORA] = False
    """Export only the adapter, not the merged model."""

    enable_qlora: Annotated[Keyed[bool], Served()] = False
    """QLoRA (Dettmers et al. 2023): quantize the base weights and train adapters. All linear layers
    of the decoder blocks are quantized, with experts, without routers, layer by layer as they are
    loaded. Prequantized weights are used as they are. Implies `enable_lora: true`."""

    quant_format: Annotated[Keyed[QuantFormat], QLORA, Served()] = "nvfp4"
    """QLoRA: format of the base weights: `nvfp4` (4-bit, a scale for each 16 values), `nf4` (4-bit
    NormalFloat), `block_fp8` (FP8 with 128 x 128 tiles), `int8`, or `int8_int4_experts` (int8 with
    int4 experts). A prequantized checkpoint keeps its own."""

    quant_group_size: Annotated[
        int | None, CacheKey("always", value="keyed_group_size"), QLORA, Served(documented=16)
    ] = Field(default=None, gt=0)
    """QLoRA: group size, the number of columns that share a scale. Unset: 16 for `nvfp4`, 128 for
    `block_fp8`, 64 for `nf4`, 128 for experts of `int8_int4_experts`; the last two take other
    powers of two too."""

    exclude_modules: Annotated[
        Keyed[Annotated[list[str] | None, AfterValidator(readable)]],
        QLORA,
        Served(name="qlora_exclude_modules"),
    ] = None
    """QLoRA: modules that are not quantized, by consecutive parts of their names (`self_attn`,
    `layers.0`) or patterns (`layers.[0-3].*`). Embeddings, LM head, norms and routers never are.
    Unset: those that a prequantized checkpoint lists, else none."""

    merge_lora_interval: Annotated[
        Keyed[int],
        LORA,
        NotWith(
            "lora.use_dora",
            why="merges low-rank products every {own} step(s), but with use_dora: true the"
            " magnitudes of rows are trained too, which are not part of a product",
        ),
        *(
            NotWith(
                setting,
                (value,),
                why="merges adapters into the model every {own} step(s), so the adapter alone,"
                f" which {setting}: {{value}} exports, is not the trained model",
            )
            for setting, value in (("lora.save_lora_only", True), ("export.merge_lora", False))
        ),
        Served(),
    ] = Field(default=0, ge=0)
    """ReLoRA: merge the adapters into the base weights every `merge_lora_interval` steps and
    reinitialize them; 0: never. Checkpoints then contain the base model too, and an export only the
    merged model."""

    reset_optimizer_on_merge: Annotated[Keyed[bool], LORA, MERGED, Served()] = False
    """ReLoRA: reset the optimizer states of the adapters at each merge. Needs
    `merge_lora_interval`."""

    enable_aqn: Annotated[
        Keyed[bool],
        QLORA,
        NotWith(
            "lora.use_dora",
            why="its noise would change the norms of rows, which use_dora: true needs, in each"
            " step",
        ),
    ] = False
    """Adaptive quantization noise, for QLoRA: add normally distributed noise of the size of a
    quantization step to quantized weights in training, different in each step."""

    aqn_alpha: Annotated[Keyed[float], NOISE] = Field(default=1.0, ge=0)
    """Adaptive quantization noise: factor of the noise."""

    @property
    def expert_sharing(self) -> Literal["each", "shared", "hybrid"]:
        if self.moe_shared_lora:
            return "shared"
        return "hybrid" if self.moe_hybrid_shared_lora else "each"

    @property
    def resolved_group_size(self) -> int | None:
        """Group size unless weights are prequantized; None: a scale for each row."""
        return self.quant_group_size or self.default_group_size

    @property
    def default_group_size(self) -> int | None:
        return next(iter(GROUPS[self.quant_format]), None)

    @property
    def keyed_group_size(self) -> int | str:
        """In keys 16 means unset, also for formats with another default size."""
        if self.quant_group_size in (None, self.default_group_size):
            return 16
        return "16 columns" if self.quant_group_size == 16 else self.quant_group_size

    @property
    def is_merged_in_training(self) -> bool:
        return self.merge_lora_interval > 0
