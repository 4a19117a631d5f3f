"""NxDT: precision, optimizers and schedules of NeMo, of which NxDT takes them."""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.translation import Draft, Entry, Rule

ADAM = ("adamw", "adamw_fp32OptState")
# Optimizers that are PyTorch's here.
BY_FULL_NAME = {
    "adam": "Adam",
    "adadelta": "Adadelta",
    "adamax": "Adamax",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "adafactor": "Adafactor",
}
NOVOGRAD = "novograd"
# NeMo's, where a file has none.
BETAS_OF_NOVOGRAD = [0.95, 0.98]

WITH_BETAS = (*ADAM, "adam", "adamax", NOVOGRAD)
# Arguments, and the optimizers that have them.
ARGUMENTS = {
    "betas": WITH_BETAS,
    "eps": (*WITH_BETAS, "adadelta", "adagrad", "rmsprop"),
    "grad_averaging": (NOVOGRAD,),
}

# NeMo's schedules to ours. All but the first, a cosine with a tail and the last two warm up as
# `plus_one`.
STYLES: Mapping[str, str] = {
    "LinearAnnealingWithWarmUp": "linear",
    "CosineAnnealing": "cosine",
    "WarmupPolicy": "constant",
    "WarmupHoldPolicy": "constant",
    "WarmupAnnealing": "linear",
    "SquareAnnealing": "square",
    "SquareRootAnnealing": "sqrt",
    "InverseSquareRootAnnealing": "inverse_sqrt",
    "NoamAnnealing": "noam",
    "NoamHoldAnnealing": "noam_hold",
    "PolynomialDecayAnnealing": "polynomial",
    "PolynomialHoldDecayAnnealing": "polynomial",
    "StepLR": "step",
    "ExponentialLR": "exponential",
}

# PyTorch's own, which have no warmup and no least rate. NeMo steps them with the optimizer.
PYTORCHS = ("StepLR", "ExponentialLR")

# Arguments of schedules, with those that read them; they have these names here too.
OF_STYLE: Mapping[str, tuple[str, ...]] = {
    "hold_steps": ("WarmupHoldPolicy", "NoamHoldAnnealing", "PolynomialHoldDecayAnnealing"),
    "constant_steps": ("CosineAnnealing",),
    "power": ("PolynomialDecayAnnealing", "PolynomialHoldDecayAnnealing"),
    "d_model": ("NoamAnnealing",),
    "decay_rate": ("NoamHoldAnnealing",),
    "step_size": ("StepLR",),
    "gamma": PYTORCHS,
}

SCHEDULE, MORE = "model.optim.sched", "train.lr_schedule_kwargs"
WARMUP_STYLE = f"{MORE}.warmup_style"

FALLS_TO_ZERO = "LinearAnnealingWithWarmUp"


FLOAT32_STATES = (
    "Trainium rounds at random wherever it casts to bfloat16; here weights and states are kept in"
    " float32, and nothing that lasts is rounded"
)


def _optimizer(entry: Entry) -> None:
    name = entry.value
    if name in BY_FULL_NAME:
        entry.put("train.optimizer", f"torch.optim.{BY_FULL_NAME[name]}")
        if name == "adafactor":
            entry.approximated("PyTorch's Adafactor, which takes its rate from the schedule alone")
    elif name == NOVOGRAD:
        entry.put("train.optimizer", NOVOGRAD)
        entry.put("train.optimizer_dtype", "fp32")
    elif name in ("sgd", *ADAM):
        entry.put("train.optimizer", name if name == "sgd" else "adamw")
        if name == "adamw_fp32OptState":
            entry.explain("states are always float32 here; decay comes before the step, not after")
    else:
        entry.leave_out(f"it takes {', '.join(('sgd', *ADAM, NOVOGRAD, *BY_FULL_NAME))}")


def _argument(entry: Entry) -> None:
    name, optimizer = entry.key.rpartition(".")[2], entry.get("model.optim.name", "adamw")
    if optimizer not in ARGUMENTS[name]:
        entry.no_effect(f"{optimizer} has none")
        return
    if name == "eps" and entry.is_assumed and optimizer == "adamw_fp32OptState":
        entry.line.value = 1e-6
    if name == "betas" and entry.is_assumed and optimizer == NOVOGRAD:
        entry.line.value = BETAS_OF_NOVOGRAD
    entry.put(f"train.optimizer_kwargs.{name}", entry.line.value)


def _amsgrad(entry: Entry) -> None:
    optimizer = entry.get("model.optim.name", "adamw")
    if optimizer in (NOVOGRAD, "adam"):
        entry.put("train.optimizer_kwargs.amsgrad", bool(entry.value))
    elif entry.value and optimizer in ADAM:
        entry.leave_out(
            "AdamW has no such variant here: write false, or torch.optim.Adam's name, adam"
        )
    else:
        entry.no_effect("is off")


def _schedule(entry: Entry) -> None:
    name = entry.value
    if name not in STYLES:
        entry.leave_out(f"it takes {', '.join(STYLES)}")
        return
    entry.put("train.lr_decay_style", STYLES[name])
    if name in PYTORCHS:
        entry.put("train.lr_min", 0.0)
        entry.explain("steps are the optimizer's, as NeMo steps its schedules")
        return
    if name == FALLS_TO_ZERO:
        entry.put("train.lr_min", 0.0)
    # NeMo's WarmupPolicy warms up by (step + 1) / (warmup + 1). A cosine with a tail is Megatron's,
    # whose warmup begins at 0.
    starts_at_zero = name in (FALLS_TO_ZERO, "NoamAnnealing") or (
        name == "CosineAnnealing" and entry.get(f"{SCHEDULE}.constant_steps")
    )
    warms = entry.get(f"{SCHEDULE}.warmup_steps") or entry.get(f"{SCHEDULE}.warmup_ratio")
    # InverseSquareRootAnnealing divides by step + 1 without a warmup, too.
    if not starts_at_zero and (warms or name == "InverseSquareRootAnnealing"):
        entry.put(WARMUP_STYLE, "plus_one")


def _warmup_ratio(entry: Entry) -> None:
    steps = entry.get("trainer.max_steps")
    if isinstance(steps, int) and isinstance(entry.value, int | float):
        # Rounded down, as in NeMo: int(warmup_ratio * max_steps).
        entry.put("train.lr_warmup_steps", int(entry.value * steps))
    else:
        entry.put("train.lr_warmup_ratio", entry.value)


def _least_rate(entry: Entry) -> None:
    name = entry.get(f"{SCHEDULE}.name")
    if name in (FALLS_TO_ZERO, *PYTORCHS):
        entry.no_effect(f"{name} falls towards 0")
        return
    # Of NeMo's schedules this one alone has a floor unasked: min_lr=1e-5.
    if entry.is_assumed and name == "SquareAnnealing":
        entry.line.value = 1e-5
    entry.put("train.lr_min", entry.line.value)


def _schedule_argument(entry: Entry) -> None:
    # An argument of a schedule; `hold_ratio` and `constant_ratio` are shares of `max_steps` that
    # stand for numbers of steps.
    name, steps = entry.get(f"{SCHEDULE}.name"), entry.get("trainer.max_steps")
    argument = entry.key.rpartition(".")[2]
    setting = argument.replace("ratio", "steps")
    if name not in OF_STYLE[setting]:
        entry.no_effect(f"{name} does not read it")
    elif setting == argument:
        entry.put(f"{MORE}.{argument}", entry.value)
    elif isinstance(steps, int) and isinstance(entry.value, int | float):
        entry.put(f"{MORE}.{setting}", int(entry.value * steps))
    else:
        entry.leave_out("a share of trainer.max_steps, which is no number of steps")


def _precision(entry: Entry) -> None:
    kind = entry.value
    if kind == "fp32":
        entry.put("train.precision", "fp32")
    elif kind in ("mixed_precision", "autocast", "mixed_precisionSR", "mixed_precision_SR"):
        entry.put("train.precision", "bf16_mixed")
        entry.put("train.grad_accum_dtype", "fp32")
        if kind == "autocast":
            entry.approximated(
                "all products are computed in bfloat16, sums and norms in float32; there autocast"
                " decides for each operation"
            )
        elif kind.endswith("SR"):
            entry.approximated(FLOAT32_STATES)
    elif kind == "bf16SR":
        entry.put("train.precision", "bf16")
        entry.put("train.stochastic_rounding", True)
        _accumulate_in_bf16(entry)
        entry.approximated(
            "the optimizer rounds at random what it keeps in bfloat16; Trainium does so wherever it"
            " casts"
        )
    elif kind == "manual":
        _by_hand(entry)
    else:
        entry.leave_out(
            "it takes fp32, mixed_precision, mixed_precisionSR, bf16SR, autocast and manual"
        )


def _accumulate_in_bf16(entry: Entry) -> None:
    entry.put("train.grad_accum_dtype", "bf16")
    entry.put("train.fsdp_reduce_dtype", "bf16")


BITS = ("precision.xla_use_bf16", "precision.xla_downcast_bf16")
ROUNDING = "precision.neuron_rt_stochastic_rounding_en"


def _by_hand(entry: Entry) -> None:
    has_masters = bool(entry.get("precision.master_weights"))
    if not _computes_in_bf16(entry):
        entry.put("train.precision", "fp32")
        return
    entry.put("train.precision", "bf16_mixed" if has_masters else "bf16")
    if entry.get("precision.fp32_grad_acc"):
        entry.put("train.grad_accum_dtype", "fp32")
    else:
        _accumulate_in_bf16(entry)


def _computes_in_bf16(entry: Entry) -> bool:
    return any(_is_on(entry.get(name)) for name in BITS)


def _is_on(value: Any) -> bool:
    return value in (1, "1", True, "true")


def _rounding(entry: Entry) -> None:
    if not _is_on(entry.value) or not _computes_in_bf16(entry):
        entry.no_effect("nothing is rounded at random")
    elif entry.get("precision.master_weights"):
        entry.approximated(FLOAT32_STATES)
    else:
        entry.put("train.stochastic_rounding", True)


def settle_states(draft: Draft) -> None:
    """AdamW and NovoGrad keep states as weights are kept, unless a name says float32; and PyTorch's
    own schedules have no warmup."""
    schedule = draft.get(f"{SCHEDULE}.name")
    if schedule in PYTORCHS:
        for setting in ("lr_warmup_steps", "lr_warmup_ratio"):
            draft.drop(f"train.{setting}", f"{schedule} has no warmup")
    name = "model.optim.name"
    if draft.value("train.precision") == "bf16" and draft.get(name) == NOVOGRAD:
        draft.put("train.optimizer_dtype", "bf16")
    if draft.value("train.precision") == "bf16" and draft.get(name) == "adamw":
        draft.put("train.optimizer", "anyprecision_adamw")
        draft.put("train.optimizer_dtype", "bf16")
        draft.set_line(name, "translated", "its states are in bfloat16, as the weights are")
        draft.lines[name].names.append("train.optimizer_dtype")


SAME: Mapping[str, str] = {
    "model.optim.lr": "train.lr",
    "model.optim.weight_decay": "train.weight_decay",
    f"{SCHEDULE}.warmup_steps": "train.lr_warmup_steps",
}

COMPUTED: Mapping[str, Rule] = {
    "model.optim.name": _optimizer,
    **{f"model.optim.{name}": _argument for name in ARGUMENTS},
    "model.optim.amsgrad": _amsgrad,
    "model.optim.luc": rule.when(
        lambda entry: entry.value and entry.get("model.optim.name") == NOVOGRAD,
        rule.left_out("updates are not clipped by norms of weights here: write false"),
        "is off",
    ),
    "model.do_layer_norm_weight_decay": rule.explained(
        rule.put("train.no_decay_params", lambda decays: ["bias"] if decays else ["bias", "norm"]),
        "as documented; upstream does the opposite for models of source hf",
    ),
    f"{SCHEDULE}.name": _schedule,
    f"{SCHEDULE}.warmup_ratio": _warmup_ratio,
    f"{SCHEDULE}.min_lr": _least_rate,
    **{
        f"{SCHEDULE}.{argument}": _schedule_argument
        for argument in (*OF_STYLE, "hold_ratio", "constant_ratio")
    },
    f"{SCHEDULE}.cycle": rule.when(
        lambda entry: entry.value and str(entry.get(f"{SCHEDULE}.name")).startswith("Polynomial"),
        rule.left_out("a polynomial decay does not begin again here"),
        "nothing begins again",
    ),
    "precision.type": _precision,
    **dict.fromkeys(
        ("precision.master_weights", *BITS),
        rule.where("precision.type", "manual", then=rule.decides("train.precision")),
    ),
    "precision.fp32_grad_acc": rule.where(
        "precision.type",
        "manual",
        then=rule.decides("train.grad_accum_dtype", "train.fsdp_reduce_dtype"),
    ),
    ROUNDING: rule.where("precision.type", "manual", then=_rounding),
}

DEFAULTS: Mapping[str, Any] = {
    "model.optim.betas": [0.9, 0.999],
    "model.optim.eps": 1e-8,
    "model.optim.weight_decay": 0.0,
    "model.do_layer_norm_weight_decay": False,
    f"{SCHEDULE}.min_lr": 0.0,
}

BEATEN = {f"{SCHEDULE}.warmup_ratio": (f"{SCHEDULE}.warmup_steps",)}
