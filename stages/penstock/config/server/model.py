"""Which model a training server trains, and by which adapters: part of its flat file."""

from typing import Any, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.model import Attention
from penstock.config.schema.quantization import QuantFormat


class ServerModel(ConfigSection):
    """The base model, its implementation, its numerics and its adapters."""

    model_path: str = Field(min_length=1)
    """Pre-trained weights: a Hugging Face hub id, a local folder, or `builtin:tiny-qwen3`, a model
    that starts from the seed."""

    model_name: str | None = Field(default=None, min_length=1)
    """What clients may call the model, besides its path. Unset: the same as `model_path`."""

    config_path: str | None = Field(default=None, min_length=1)
    """The model's configuration, when it is not in `model_path`: a hub id, a local folder or
    `builtin:tiny-qwen3`. Unset: the same as `model_path`."""

    tokenizer_path: str | None = Field(default=None, min_length=1)
    """The tokenizer: a hub id, a local folder or `builtin:bytes`. Unset: the same as
    `config_path`."""

    attn_implementation: Attention = "flash_attention_3"
    """Attention backend, as `model.attn_implementation` of a run: the one that is written, and
    where none is, the best that this machine has, with `flash_attention_3` before others."""

    moe_implementation: Literal["eager", "triton", "native", "quack"] | None = None
    """Mixture-of-experts kernels. Unset: the best that this machine has for the model's experts."""

    ep_dispatch: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens travel between ranks that hold different experts."""

    deepep_buffer_size_gb: float = Field(default=2.0, gt=0)
    """DeepEP: buffer per GPU, in gigabytes."""

    deepep_num_sms: int = Field(default=20, gt=0, multiple_of=2)
    """DeepEP: streaming multiprocessors set aside for communication; even."""

    deepep_async_combine: bool = False
    """DeepEP: let expert outputs return while the next thing is computed that does not wait for
    them."""

    merge_qkv: bool = True
    """Keep the query, key and value projections as one fused matrix. Tensor parallelism wants
    them apart."""

    basic_modules: list[str] = Field(default_factory=list[str])
    """Names of further module classes that FSDP shards as units of their own."""

    foundation: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Entries that replace those of the model's own configuration."""

    encoders: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Encoders of multimodal models. Anything in it is refused: the families here read text."""

    router_fp32: bool = True
    """Mixture of experts: keep routers' weights and compute their logits in fp32."""

    lm_head_fp32: bool = True
    """Compute logits in fp32 also where the rest is computed in bf16."""

    rmsnorm_native: bool = False
    """Compute norms with PyTorch's plain operations also where a fused kernel serves."""

    activation_native: bool = False
    """The same of feed-forward networks' activations."""

    rope_native: bool = False
    """The same of rotary position embedding."""

    attention_cast_bf16: bool = False
    """Compute attention in bf16 also where the rest is computed in fp32."""

    freeze_router: bool = True
    """Mixture of experts: leave routers' weights as they are."""

    enable_lora: bool = False
    """Train adapters: many models share one base then. Otherwise all weights of one model are
    trained at a time."""

    lora_rank: int = Field(default=32, gt=0)
    """Rank of an adapter that is not asked for with another, and the greatest that there may be."""

    lora_alpha: int | float = Field(default=16, gt=0)
    """Scale of adapters that are not asked for with another: they count alpha / rank times."""

    lora_target_modules: list[str] | Literal["all-linear"] | None = Field(
        default=None, min_length=1
    )
    """Layers that bear an adapter, as `lora.lora_target_modules` of a run."""

    moe_shared_lora: bool = False
    """Mixture of experts: the experts of a layer share their adapters."""

    moe_hybrid_shared_lora: bool = False
    """Mixture of experts: the experts of a layer share the factors on the side of the model's
    width."""

    enable_qlora: bool = False
    """Quantize the base weights, and train adapters on top. Implies `enable_lora: true`."""

    quant_format: QuantFormat = "nvfp4"
    """QLoRA: format of the base weights, as `lora.quant_format` of a run."""

    quant_group_size: int = Field(default=16, gt=0)
    """QLoRA: columns that share a scale. Unset: what the format has."""

    qlora_exclude_modules: list[str] | None = None
    """QLoRA: modules that are not quantized, as `lora.exclude_modules` of a run."""

    merge_lora_interval: int = Field(default=0, ge=0)
    """Merge adapters into the base weights every so many steps; 0 never."""

    reset_optimizer_on_merge: bool = False
    """Forget the optimizer's states of the adapters at each merge (ReLoRA)."""
