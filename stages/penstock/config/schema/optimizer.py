"""The optimizer and its learning rate."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Keyed, KeyedUnlessDefault
from penstock.config.schema.lr_schedule import DecayStyle, ScheduleConfig

FullName = Annotated[str, Field(pattern=r"^torch(ao)?\.optim\.\w+$")]
"""An optimizer of PyTorch or torchao, by its full name."""

Argument = bool | int | float | str | list[float | None] | None
"""Values of an optimizer's keyword arguments."""


class OptimConfig(ConfigSection):
    """The optimizer, the learning rate schedule and weight decay."""

    optimizer: Keyed[
        Literal["adamw", "anyprecision_adamw", "sgd", "muon", "novograd"] | FullName
    ] = "adamw"
    """Optimizer: `adamw`, `anyprecision_adamw` (states in `optimizer_dtype`), `sgd`, `muon` or
    `novograd`; or any other of PyTorch's or torchao's by its full name, such as `torch.optim.RAdam`
    or `torchao.optim.AdamW8bit`."""

    optimizer_dtype: Keyed[Literal["fp32", "bf16"]] = "bf16"
    """Dtype of the optimizer states of `anyprecision_adamw`, `muon` and `novograd`."""

    optimizer_kwargs: KeyedUnlessDefault[dict[str, Argument]] = Field(
        default_factory=dict[str, Argument]
    )
    """Further keyword arguments of the optimizer: `{betas: [0.9, 0.95], eps: 1e-8}` for Adam and
    its variants (and for the parameters that `muon` leaves to AdamW), `use_kahan_summation: true`
    for `anyprecision_adamw`, `{momentum: 0.9, dampening: 0, nesterov: true}` for `sgd`, `{betas:
    [0.95, 0.98], eps: 1e-8, grad_averaging: false, amsgrad: false}` for `novograd`."""

    lr: Keyed[float] = Field(default=5e-5, ge=0)
    """Peak learning rate."""

    vision_lr: KeyedUnlessDefault[float | None] = Field(default=None, gt=0)
    """Peak learning rate of the vision tower, on the schedule of `lr`, where it is trained
    (`model.freeze`). Unset: `lr`."""

    projector_lr: KeyedUnlessDefault[float | None] = Field(default=None, gt=0)
    """Peak learning rate of the projector between vision tower and language model, on the schedule
    of `lr`, where it is trained. Unset: `lr`."""

    lr_min: Keyed[float] = Field(default=1e-7, ge=0)
    """Learning rate at the end of the decay."""

    lr_start: Keyed[float] = Field(default=0.0, ge=0)
    """Learning rate of the first warmup step."""

    lr_warmup_ratio: Keyed[float] = Field(default=0.0, ge=0, le=1)
    """Warmup as a fraction of all steps, 0 to 1, over which the learning rate rises linearly to its
    peak."""

    lr_warmup_steps: KeyedUnlessDefault[int | None] = Field(default=None, ge=0)
    """Warmup steps; replaces `lr_warmup_ratio`."""

    lr_decay_style: Keyed[DecayStyle] = "constant"
    """Learning rate schedule after the warmup: `constant`, or a decay to `lr_min`: `linear`,
    `cosine`, `polynomial`, `wsd` (warmup-stable-decay: at the peak until near the end), `square`,
    `sqrt`, `inverse_sqrt`, `noam`, `noam_hold`, `step`, `exponential`."""

    lr_decay_ratio: Keyed[float] = Field(default=1.0, ge=0, le=1)
    """Fraction of all steps, 0 to 1, after which the decay has reached `lr_min`."""

    lr_schedule_kwargs: KeyedUnlessDefault[ScheduleConfig] = Field(default_factory=ScheduleConfig)
    """Further arguments of the learning rate schedule."""

    layerwise_lr_decay_bound: KeyedUnlessDefault[float] = Field(default=1.0, gt=0, le=1)
    """Layer-wise learning rate decay: the embedding's learning rate as a fraction b of `lr`. Layer
    i of n, from 0, uses b + i/(n+2) (1-b), so layer 0 has the embedding's rate; the final norm and
    the LM head use `lr`. As in ERNIEKit."""

    weight_decay: Keyed[float] = Field(default=0.0, ge=0)
    """Weight decay. `adamw`, `anyprecision_adamw` and `muon` decouple it: weights shrink by lr x
    decay of themselves. `novograd` adds decay x weight to what it averages. `sgd` adds it to the
    gradient (L2), and so do optimizers by their full names, such as `torch.optim.RAdam`, unless
    PyTorch documents otherwise (`AdamW`; `decoupled_weight_decay: true` in `optimizer_kwargs` of
    `NAdam` and `RAdam`)."""

    no_decay_modules: Keyed[list[str]] = Field(default_factory=list[str])
    """No weight decay for parameters of modules whose name contains one of these, for example
    `[norm]`."""

    no_decay_params: Keyed[list[str]] = Field(default_factory=list[str])
    """No weight decay for parameters whose name contains one of these, for example `[bias]`."""

    max_grad_norm: Keyed[float] = Field(default=1.0, ge=0)
    """Gradient clipping: maximum global norm of the gradients; 0: no clipping."""

    qk_clip_threshold: KeyedUnlessDefault[float | None] = Field(default=None, gt=0)
    """QK-clip: after a step, the weights of queries and keys are scaled so that attention logits of
    a head stay below this value; 100 with `optimizer: muon` is MuonClip as in Kimi K2. Unset: no
    limit."""

    muon_lr: Keyed[float] = Field(default=0.02, ge=0)
    """Muon: peak learning rate of the weight matrices, on the schedule of `lr`."""

    muon_momentum: Keyed[float] = Field(default=0.95, ge=0, lt=1)
    """Muon: momentum."""

    muon_nesterov: Keyed[bool] = True
    """Muon: Nesterov momentum."""

    muon_ns_steps: Keyed[int] = Field(default=5, gt=0, lt=100)
    """Muon: Newton-Schulz iterations."""

    muon_adjust_lr_fn: Keyed[Literal["original", "match_rms_adamw"] | None] = None
    """Muon: scaling of the learning rate by a matrix's shape [N, K]. `original` (also if unset):
    sqrt(max(1, N/K)). `match_rms_adamw`: 0.2 sqrt(max(N, K)), with which a learning rate and weight
    decay of AdamW can be used: set `muon_lr` to `lr`."""

    muon_split_heads: KeyedUnlessDefault[bool] = False
    """Muon: each head's queries, keys and values are a matrix, orthogonalized by itself, as in
    GLM-5."""
