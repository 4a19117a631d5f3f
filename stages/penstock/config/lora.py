"""Low-rank adapters."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.availability import Later
from penstock.config.section import Section


class LoraConfig(Section):
    """Training small matrices beside frozen weights."""

    enable_lora: bool = False
    """Train adapters and leave the base weights as they are."""

    lora_rank: int = Field(default=16, gt=0)
    """Rank of the adapters."""

    lora_alpha: int = Field(default=16, gt=0)
    """Scale of the adapters: they count alpha / rank times."""

    lora_target_modules: list[str] | None = Field(default=None, min_length=1)
    """Linear layers that bear an adapter, for example `[q_proj, v_proj]`. Unset: all linear layers
    of the decoder blocks."""

    save_lora_only: bool = False
    """Export only the adapter, not the model merged with it."""

    enable_qlora: Annotated[bool, Later()] = False
    """Quantise the base weights and train adapters on top."""

    quant_format: Annotated[Literal["nvfp4", "block_fp8", "nf4"], Later()] = "nvfp4"
    """QLoRA: format of the base weights: `nvfp4` (4 bits, Hopper and later), `block_fp8` (8 bits in
    blocks) or `nf4` (4-bit normal float)."""

    quant_group_size: Annotated[int, Later()] = Field(default=16, gt=0)
    """QLoRA: weights that share a scale; 16 for `nvfp4`, 128 for `block_fp8`, 64 for `nf4`."""

    exclude_modules: Annotated[list[str] | None, Later()] = None
    """QLoRA: modules that stay in bfloat16. Unset: read from the checkpoint's configuration."""

    merge_lora_interval: Annotated[int, Later()] = Field(default=0, ge=0)
    """Merge the adapters into the base weights every so many steps; 0 never."""

    reset_optimizer_on_merge: Annotated[bool, Later()] = False
    """Forget the optimizer's states after each merge (ReLoRA). Needs `merge_lora_interval`."""

    enable_aqn: Annotated[bool, Later()] = False
    """QLoRA: add calibrated noise to quantised weights in the forward pass."""

    aqn_alpha: Annotated[float, Later()] = Field(default=1.0, ge=0)
    """QLoRA: magnitude of that noise."""
