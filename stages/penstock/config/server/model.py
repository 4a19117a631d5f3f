"""The base model of a training server and its adapters: part of its flat file."""

from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.model import Attention
from penstock.config.schema.quantization import QuantFormat


class ServerModel(ConfigSection):
    """Base model, precision and adapters.

    Fields without a docstring have that of the run's field (`run_fields.py: SAME`).
    """

    model_path: str = Field(min_length=1)
    """Pre-trained weights: a Hugging Face hub id, a local folder, or `builtin:tiny-qwen3`, a model
    with random weights."""

    model_name: str | None = Field(default=None, min_length=1)
    """Name that clients may use for the model, besides its path. Unset: the same as
    `model_path`."""

    config_path: str | None = Field(default=None, min_length=1)
    tokenizer_path: str | None = Field(default=None, min_length=1)
    backend: Literal["auto", "native", "transformers"] = "auto"
    attn_implementation: Attention = "flash_attention_3"
    """Attention backend, as `model.attn_implementation` of a run. If it is not written: the best
    one on this machine; `flash_attention_3` is preferred where it is installed."""

    moe_implementation: Literal["eager", "triton", "native", "quack"] | None = None
    ep_dispatch: Literal["alltoall", "deepep"] = "alltoall"
    deepep_buffer_size_gb: float = Field(default=2.0, gt=0)
    deepep_num_sms: int = Field(default=20, gt=0, multiple_of=2)
    deepep_async_combine: bool = False
    merge_qkv: bool = True
    basic_modules: list[str] = Field(default_factory=list[str])
    foundation: dict[str, Any] = Field(default_factory=dict[str, Any])
    encoders: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Must be empty: a server serves the model of one folder. `penstock models compose` writes one
    with a vision tower."""

    router_fp32: bool = True
    lm_head_fp32: bool = True
    rmsnorm_native: bool = False
    activation_native: bool = False
    rope_native: bool = False
    attention_cast_bf16: bool = False
    freeze_router: bool = True

    @field_validator("encoders")
    @classmethod
    def _is_composed(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value:
            raise ValueError(
                f"has encoders ({', '.join(sorted(value))}), and a server serves the model of one"
                " folder; leave it out, run `penstock models compose TEXT --image ENCODER -o OUT`,"
                " and write OUT as model_path"
            )
        return value

    enable_lora: bool = False
    """Train LoRA adapters: many models share the base model. Otherwise all weights of one model at
    a time are trained."""

    lora_rank: int = Field(default=32, gt=0)
    """Maximum rank of an adapter, and the rank if a client does not request one."""

    lora_alpha: int | float = Field(default=16, gt=0)
    """LoRA alpha if a client does not request one: the output of an adapter is scaled by alpha /
    rank."""

    lora_target_modules: list[str] | Literal["all-linear"] | None = Field(
        default=None, min_length=1
    )
    moe_shared_lora: bool = False
    moe_hybrid_shared_lora: bool = False
    enable_qlora: bool = False
    quant_format: QuantFormat = "nvfp4"
    quant_group_size: int = Field(default=16, gt=0)
    qlora_exclude_modules: list[str] | None = None
    merge_lora_interval: int = Field(default=0, ge=0)
    reset_optimizer_on_merge: bool = False
