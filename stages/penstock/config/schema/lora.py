"""Low-rank adapters."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import (
    CacheKey,
    Keyed,
    KeyedByContent,
    KeyedUnlessDefault,
    Unkeyed,
)
from penstock.config.schema.quantization import GROUPS, QuantFormat, readable


class LoraConfig(ConfigSection):
    """Training small matrices beside frozen weights."""

    enable_lora: Keyed[bool] = False
    """Train adapters and leave the base weights as they are."""

    lora_rank: Keyed[int] = Field(default=16, gt=0)
    """Rank of the adapters."""

    lora_alpha: Keyed[int | float] = Field(default=16, gt=0)
    """Scale of the adapters: they count alpha / rank times."""

    use_rslora: KeyedUnlessDefault[bool] = False
    """Divide alpha by the root of the rank instead, so that adapters of a large rank learn as fast
    as those of a small one."""

    use_dora: KeyedUnlessDefault[bool] = False
    """Train the norm of each row of an adapted weight apart from its direction."""

    lora_plus_ratio: KeyedUnlessDefault[float] = Field(default=1.0, gt=0)
    """The second factors (B) learn so many times as fast as `train.lr` says. Metrics show the rate
    of all others. Those of an embedding, whose first factor starts at zero, are among these."""

    lora_bias: KeyedUnlessDefault[Literal["none", "all", "lora_only"]] = "none"
    """Biases of the model that are trained as well: all that it has, or those of layers that bear
    an adapter."""

    lora_dropout: KeyedUnlessDefault[float] = Field(default=0.0, ge=0, lt=1)
    """Probability with which each feature of an adapter's input is dropped while training."""

    lora_target_modules: Keyed[
        Annotated[list[str] | Literal["all-linear"] | None, Field(min_length=1)]
    ] = None
    """Layers that bear an adapter, by their names in the checkpoint or the ends of these, for
    example `[q_proj, v_proj]`, or by patterns, in which `*` is any text: `layers.[0-3].*.q_proj`.
    Experts have such names too: `gate_proj` means that of every network, `experts.*.gate_proj`
    those of experts alone, and `mlp.gate_proj` those of networks without experts. `embed_tokens`
    and `lm_head` may be named where they are not tied. `all-linear`: all linear layers but the
    head. Unset: all linear layers of the decoder blocks, experts included and routers not."""

    init_adapter_path: KeyedByContent[str | None] = None
    """An adapter to go on from: a folder or hub id with `adapter_config.json`. Its rank, alpha,
    targets and form are taken from there unless they are written, and then must agree."""

    moe_shared_lora: KeyedUnlessDefault[bool] = False
    """Mixture of experts: the experts of a layer share their adapters, one for each of their
    matrices. An adapter that is exported holds a copy for each expert."""

    moe_hybrid_shared_lora: KeyedUnlessDefault[bool] = False
    """Mixture of experts: the experts of a layer share the factors on the side of the model's
    width, the first (A) of gate and up and the second (B) of down; each has its own others."""

    save_lora_only: Unkeyed[bool] = False
    """Export only the adapter, not the model merged with it."""

    enable_qlora: Keyed[bool] = False
    """Quantize the base weights and train adapters on top (Dettmers et al. 2023, "QLoRA"): all
    linear layers within blocks, experts included and routers not, layer by layer as they are read.
    Weights that are published quantized are used as they are. Implies `enable_lora: true`."""

    quant_format: Keyed[QuantFormat] = "nvfp4"
    """QLoRA: format of the base weights: `nvfp4` (4 bits, a scale for 16), `nf4` (4-bit normal
    float), `block_fp8` (8 bits in tiles), `int8`, or `int8_int4_experts`, in which experts have 4
    bits. Of a checkpoint that is published quantized it is that of the checkpoint."""

    quant_group_size: Annotated[int | None, CacheKey("always", null=16)] = Field(default=None, gt=0)
    """QLoRA: columns that share a scale. Unset: 16 for `nvfp4`, 128 for `block_fp8`, 64 for `nf4`,
    128 for experts of `int8_int4_experts`; the last two take other powers of two as well."""

    exclude_modules: Keyed[Annotated[list[str] | None, AfterValidator(readable)]] = None
    """QLoRA: modules that are not quantized, by runs of the parts of their names (`self_attn`,
    `layers.0`) or patterns (`layers.[0-3].*`). Embeddings, head, norms and routers never are.
    Unset: those that a checkpoint which is published quantized names, else none."""

    merge_lora_interval: Keyed[int] = Field(default=0, ge=0)
    """Merge the adapters into the base weights every so many steps, and let them start anew; 0
    never. Checkpoints then hold the base model too, and an export is the merged model alone."""

    reset_optimizer_on_merge: Keyed[bool] = False
    """Forget the optimizer's states of the adapters at each merge (ReLoRA). Needs
    `merge_lora_interval`."""

    enable_aqn: Keyed[bool] = False
    """QLoRA: add noise of the size of a quantization step to quantized weights in training, drawn
    anew each step."""

    aqn_alpha: Keyed[float] = Field(default=1.0, ge=0)
    """QLoRA: what that noise is multiplied by."""

    @property
    def resolved_group_size(self) -> int | None:
        """Columns that share a scale, unless weights are published quantized; None: whole rows."""
        return self.quant_group_size or next(iter(GROUPS[self.quant_format]), None)
