"""The optimizer and the schedule of its learning rate."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import CacheKey, Keyed, KeyedUnlessDefault
from penstock.config.schema.effect import TRAINS, NativeOnly, NotWith, OnlyWith
from penstock.config.schema.registered import Registered
from penstock.config.schema.served import Served
from penstock.core.extensions import OPTIMIZERS

DecayStyle = Literal[
    "constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd", "square", "sqrt", "noam",
    "noam_hold", "step", "exponential",
]  # fmt: skip

# Decay styles that reach `lr_min` at a known step; the others keep falling.
ENDING: tuple[DecayStyle, ...] = ("linear", "cosine", "polynomial", "wsd", "square", "sqrt")


DECAYS = OnlyWith(
    "train.lr_decay_style",
    unless=("constant",),
    words="a decay, such as lr_decay_style: cosine",
    why="the learning rate is constant and does not decay to it",
    unmet="notice",
)

NOT_NOAM = NotWith(
    "train.lr_decay_style",
    ("noam",),
    why="noam has a warmup of its own",
    instead="leave {field} out",
)

# Decay styles that may begin some steps after the warmup.
HOLDING: tuple[DecayStyle, ...] = (
    *("constant", "linear", "cosine", "polynomial", "inverse_sqrt"),
    *("square", "noam_hold", "step", "exponential"),
)


def _of(*styles: DecayStyle) -> OnlyWith:
    return OnlyWith("train.lr_decay_style", styles, why="is not used by {name}: {value}")


class ScheduleConfig(ConfigSection):
    """Further arguments of the learning rate schedule. Each is used by some styles of warmup or
    decay and is an error with the others. Steps are optimizer steps."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (TRAINS,)

    warmup_style: Annotated[
        Literal["zero_start", "plus_one"],
        OnlyWith(
            "train.has_warmup_style",
            words="lr_warmup_steps or lr_warmup_ratio",
            why="there is no warmup",
        ),
        NOT_NOAM,
    ] = "zero_start"
    """`zero_start`: step s of W warmup steps uses s/W, so the first step uses `lr_start`.
    `plus_one`: (s+1)/(W+1)."""

    hold_steps: Annotated[int, _of(*HOLDING), DECAYS] = Field(default=0, ge=0)
    """Steps at the peak between warmup and decay."""

    constant_steps: Annotated[int, _of(*ENDING)] = Field(default=0, ge=0)
    """Steps at `lr_min` at the end; the decay ends that many steps earlier."""

    num_cycles: Annotated[float, _of("cosine", "wsd")] = Field(default=0.5, gt=0)
    """`cosine`: number of cosine periods in the decay; 0.5 is one descent."""

    power: Annotated[float, _of("polynomial")] = Field(default=1.0, gt=0)
    """`polynomial`: exponent; 1 is linear, 2 falls fast first."""

    gamma: Annotated[float, _of("step", "exponential")] = Field(default=0.1, gt=0, le=1)
    """`step` and `exponential`: factor of the learning rate for every `step_size` steps."""

    step_size: Annotated[int, _of("step", "exponential")] = Field(default=1, gt=0)
    """`step` and `exponential`: number of steps in which the learning rate is multiplied by `gamma`
    once."""

    d_model: Annotated[int, _of("noam")] = Field(default=1, gt=0)
    """`noam`: the model's hidden size; the learning rate is divided by its square root."""

    decay_rate: Annotated[float, _of("noam_hold")] = Field(default=0.5, gt=0)
    """`noam_hold`: exponent of W/s; with 0.5 the learning rate falls with the square root of the
    steps."""

    timescale: Annotated[int | None, _of("inverse_sqrt")] = Field(default=None, gt=0)
    """`inverse_sqrt`: steps until the learning rate falls to about 0.7 of the peak. Unset: the
    warmup steps, or 10,000 without warmup."""

    decay_steps: Annotated[int | None, _of("wsd")] = Field(default=None, ge=0)
    """`wsd`: number of decay steps. Unset: a tenth of all steps."""

    decay_shape: Annotated[Literal["linear", "cosine", "sqrt"], _of("wsd")] = "linear"
    """`wsd`: shape of the decay. `sqrt` is 1 - sqrt(p): fast first."""


# An optimizer of PyTorch or torchao, by its full name.
FullName = Annotated[str, Field(pattern=r"^torch(ao)?\.optim\.\w+$")]

# Values of an optimizer's keyword arguments.
Argument = bool | int | float | str | list[float | None] | None


# Betas of Llama and Qwen. PyTorch's default beta2, 0.999, averages over too many steps for short
# runs.
ADAM: Mapping[str, Argument] = {"betas": [0.9, 0.95], "eps": 1e-8}

# The `optimizer_kwargs` of each optimizer with a short name, with their defaults; those of
# `novograd` are NeMo's.
KWARGS: Mapping[str, Mapping[str, Argument]] = {
    "adamw": ADAM,
    "anyprecision_adamw": {**ADAM, "use_kahan_summation": False},
    "muon": ADAM,
    "sgd": {"momentum": 0.0, "dampening": 0.0, "nesterov": False},
    "novograd": {"betas": [0.95, 0.98], "eps": 1e-8, "grad_averaging": False, "amsgrad": False},
}

MUON = OnlyWith("train.optimizer", ("muon",), why="is used by muon only, and the {name} is {value}")

# A notice says that AdamW trains adapters.
MATRICES = OnlyWith("lora.enable_lora", (False,), unmet="silent")

ENDS = f"lr_decay_style: {', '.join(ENDING[:-1])} or {ENDING[-1]}"
DECAYED = OnlyWith("train.decays_weights", words="weight_decay above 0", unmet="silent")


class OptimConfig(ConfigSection):
    """The optimizer, the learning rate schedule and weight decay."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (TRAINS,)

    optimizer: Keyed[
        Annotated[
            Literal["adamw", "anyprecision_adamw", "sgd", "muon", "novograd"] | str,
            Registered(OPTIMIZERS),
        ]
        | FullName
    ] = "adamw"
    """Optimizer: `adamw`, `anyprecision_adamw` (states in `optimizer_dtype`), `sgd`, `muon` or
    `novograd`; or any other of PyTorch's or torchao's by its full name, such as `torch.optim.RAdam`
    or `torchao.optim.AdamW8bit`; or one of an installed package by its name."""

    optimizer_dtype: Annotated[
        Keyed[Literal["fp32", "bf16"]],
        OnlyWith("train.optimizer", ("anyprecision_adamw", "muon", "novograd"), unmet="silent"),
        Served(doc="Dtype of the optimizer states of `anyprecision_adamw` and `muon`."),
    ] = "bf16"
    """Dtype of the optimizer states of `anyprecision_adamw`, `muon` and `novograd`."""

    optimizer_kwargs: Annotated[
        dict[str, Argument], CacheKey("unless default", value="changed_kwargs")
    ] = Field(default_factory=dict[str, Argument])
    """Further keyword arguments of the optimizer: `{betas: [0.9, 0.95], eps: 1e-8}` for Adam and
    its variants (and for the parameters that `muon` leaves to AdamW), `use_kahan_summation: true`
    for `anyprecision_adamw`, `{momentum: 0.9, dampening: 0, nesterov: true}` for `sgd`, `{betas:
    [0.95, 0.98], eps: 1e-8, grad_averaging: false, amsgrad: false}` for `novograd`."""

    lr: Annotated[
        Keyed[float],
        NotWith(
            "train.optimizer",
            ("muon",),
            of=(0.0,),
            why="is 0, and muon_lr follows its schedule as a multiple of it",
            instead="write an lr above 0",
        ),
    ] = Field(default=5e-5, ge=0)
    """Peak learning rate."""

    vision_lr: KeyedUnlessDefault[float | None] = Field(default=None, gt=0)
    """Peak learning rate of the vision tower, on the schedule of `lr`, where it is trained
    (`model.freeze`). Unset: `lr`."""

    projector_lr: KeyedUnlessDefault[float | None] = Field(default=None, gt=0)
    """Peak learning rate of the projector between vision tower and language model, on the schedule
    of `lr`, where it is trained. Unset: `lr`."""

    lr_min: Annotated[Keyed[float], DECAYS] = Field(default=1e-7, ge=0)
    """Learning rate at the end of the decay."""

    lr_start: Annotated[
        Keyed[float],
        OnlyWith(
            "train.warms_up",
            words="lr_warmup_steps or lr_warmup_ratio",
            why="there is no warmup",
            unmet="notice",
        ),
        NOT_NOAM,
    ] = Field(default=0.0, ge=0)
    """Learning rate of the first warmup step."""

    lr_warmup_ratio: Annotated[
        Keyed[float],
        NotWith("train.lr_warmup_steps", unless=(None,), why="lr_warmup_steps is set too"),
    ] = Field(default=0.0, ge=0, le=1)
    """Warmup as a fraction of all steps, 0 to 1, over which the learning rate rises linearly to its
    peak."""

    lr_warmup_steps: Annotated[
        int | None, CacheKey("unless default", value="keyed_warmup_steps")
    ] = Field(default=None, ge=0)
    """Warmup steps; replaces `lr_warmup_ratio`."""

    lr_decay_style: Keyed[DecayStyle] = "constant"
    """Learning rate schedule after the warmup: `constant`, or a decay to `lr_min`: `linear`,
    `cosine`, `polynomial`, `wsd` (warmup-stable-decay: at the peak until near the end), `square`,
    `sqrt`, `inverse_sqrt`, `noam`, `noam_hold`, `step`, `exponential`."""

    lr_decay_ratio: Annotated[
        Keyed[float],
        OnlyWith(
            "train.lr_decay_style",
            (*ENDING, "constant"),
            words=ENDS,
            why="{name}: {value} decays until the end of the run",
        ),
        DECAYS,
    ] = Field(default=1.0, ge=0, le=1)
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

    no_decay_modules: Annotated[Keyed[list[str]], DECAYED] = Field(default_factory=list[str])
    """No weight decay for parameters of modules whose name contains one of these, for example
    `[norm]`."""

    no_decay_params: Annotated[Keyed[list[str]], DECAYED] = Field(default_factory=list[str])
    """No weight decay for parameters whose name contains one of these, for example `[bias]`."""

    max_grad_norm: Keyed[float] = Field(default=1.0, ge=0)
    """Gradient clipping: maximum global norm of the gradients; 0: no clipping."""

    qk_clip_threshold: Annotated[
        KeyedUnlessDefault[float | None],
        NotWith(
            "lora.enable_lora",
            why="cannot be used with lora.enable_lora: the weights that it scales are frozen",
        ),
        *(
            NotWith(
                setting,
                unless=(1,),
                why=f"cannot be used with {setting}: a rank has the keys of its own tokens only",
            )
            for setting in ("train.ringattn_parallel_size", "train.ulysses_parallel_size")
        ),
        NotWith(
            "train.fuse_optimizer_step",
            why="cannot be used with train.fuse_optimizer_step: weights are updated before all"
            " logits are known",
        ),
        NativeOnly("attention logits are observed in native layers only"),
    ] = Field(default=None, gt=0)
    """QK-clip: after a step, the weights of queries and keys are scaled so that attention logits of
    a head stay below this value; 100 with `optimizer: muon` is MuonClip as in Kimi K2. Unset: no
    limit."""

    muon_lr: Annotated[
        Keyed[float], MUON, MATRICES, Served(doc="Muon: learning rate of the weight matrices.")
    ] = Field(default=0.02, ge=0)
    """Muon: peak learning rate of the weight matrices, on the schedule of `lr`."""

    muon_momentum: Annotated[Keyed[float], MUON, MATRICES, Served()] = Field(
        default=0.95, ge=0, lt=1
    )
    """Muon: momentum."""

    muon_nesterov: Annotated[Keyed[bool], MUON, MATRICES, Served()] = True
    """Muon: Nesterov momentum."""

    muon_ns_steps: Annotated[Keyed[int], MUON, MATRICES, Served()] = Field(default=5, gt=0, lt=100)
    """Muon: Newton-Schulz iterations."""

    muon_adjust_lr_fn: Annotated[
        Literal["original", "match_rms_adamw"] | None,
        CacheKey("always", value="keyed_adjust_lr_fn"),
        MUON,
        MATRICES,
        Served(),
    ] = None
    """Muon: scaling of the learning rate by a matrix's shape [N, K]. `original` (also if unset):
    sqrt(max(1, N/K)). `match_rms_adamw`: 0.2 sqrt(max(N, K)), with which a learning rate and weight
    decay of AdamW can be used: set `muon_lr` to `lr`."""

    muon_split_heads: Annotated[
        KeyedUnlessDefault[bool],
        MUON,
        MATRICES,
        NativeOnly("heads are known of native layers only"),
    ] = False
    """Muon: each head's queries, keys and values are a matrix, orthogonalized by itself, as in
    GLM-5."""

    @property
    def warms_up(self) -> bool:
        """Whether there is a warmup with the settings of all styles; `noam` has its own."""
        warmup = self.lr_warmup_ratio if self.lr_warmup_steps is None else self.lr_warmup_steps
        return warmup > 0 and self.lr_decay_style != "noam"

    @property
    def has_warmup_style(self) -> bool:
        """Whether `warmup_style` is used: by a warmup, and by `inverse_sqrt`, whose timescale is
        the warmup's length."""
        style, timescale = self.lr_decay_style, self.lr_schedule_kwargs.timescale
        by_timescale = style == "inverse_sqrt" and timescale is None
        return self.warms_up or by_timescale or style == "noam"

    @property
    def decays_weights(self) -> bool:
        return self.weight_decay > 0

    @property
    def changed_kwargs(self) -> dict[str, Argument]:
        defaults = KWARGS.get(self.optimizer, {})
        arguments = self.optimizer_kwargs.items()
        return {name: value for name, value in arguments if (name, value) not in defaults.items()}

    def warmup_steps(self, total_steps: int) -> int:
        """The resolved number of warmup steps: `lr_warmup_steps`, else the ratio of all steps."""
        if self.lr_warmup_steps is not None:
            return self.lr_warmup_steps
        return int(total_steps * self.lr_warmup_ratio)

    @property
    def keyed_warmup_steps(self) -> int | None:
        """`lr_warmup_steps`; none where the ratio says the same."""
        return None if self.lr_warmup_steps == self.lr_warmup_ratio == 0 else self.lr_warmup_steps

    @property
    def keyed_adjust_lr_fn(self) -> str | None:
        """`muon_adjust_lr_fn`; none where it is what is used if unset."""
        return None if self.muon_adjust_lr_fn == "original" else self.muon_adjust_lr_fn
