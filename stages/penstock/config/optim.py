"""The optimizer and its learning rate."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.availability import Later
from penstock.config.section import Section


class OptimConfig(Section):
    """How gradients become weights."""

    optimizer: Annotated[
        Literal["adamw", "anyprecision_adamw", "sgd", "muon"], Later(allowed=("sgd",))
    ] = "adamw"
    """Optimizer: `adamw`, `anyprecision_adamw` (states in `optimizer_dtype`), `sgd` or `muon`."""

    optimizer_dtype: Annotated[Literal["fp32", "bf16"], Later()] = "bf16"
    """Precision of the optimizer's states under `anyprecision_adamw` and `muon`."""

    lr: float = Field(default=5e-5, ge=0)
    """Peak learning rate."""

    lr_min: float = Field(default=1e-7, ge=0)
    """Learning rate at the end of the decay."""

    lr_start: float = Field(default=0.0, ge=0)
    """Learning rate of the first step of the warmup."""

    lr_warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of all steps, 0 to 1, over which the learning rate rises linearly to its peak."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warmup: `constant`, or falling to `lr_min` (`linear`, `cosine`)."""

    lr_decay_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of all steps, 0 to 1, at which the decay has reached `lr_min`."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""

    no_decay_modules: list[str] = Field(default_factory=list[str])
    """Parameters of modules whose name contains one of these are not decayed, for example
    `[norm]`."""

    no_decay_params: list[str] = Field(default_factory=list[str])
    """Parameters whose name contains one of these are not decayed, for example `[bias]`."""

    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""

    muon_lr: Annotated[float, Later()] = Field(default=0.02, ge=0)
    """Muon: learning rate of the weight matrices."""

    muon_momentum: Annotated[float, Later()] = Field(default=0.95, ge=0, lt=1)
    """Muon: momentum."""

    muon_nesterov: Annotated[bool, Later()] = True
    """Muon: Nesterov momentum."""

    muon_ns_steps: Annotated[int, Later()] = Field(default=5, gt=0)
    """Muon: Newton-Schulz iterations."""

    muon_adjust_lr_fn: Annotated[Literal["original", "match_rms_adamw"] | None, Later()] = None
    """Muon: scaling of the learning rate by a matrix's shape; `match_rms_adamw` lets it use AdamW's
    learning rate and decay."""
