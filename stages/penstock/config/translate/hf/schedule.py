"""Optimizers and schedules by the names that Hugging Face's trainer gives them."""

import math
from collections.abc import Mapping
from typing import Any, cast

from penstock.config.translate.shared import has_steps
from penstock.config.translate.translation import Draft, Entry, Rule

MORE = "train.lr_schedule_kwargs"

STYLES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}

# What `lr_scheduler_kwargs` may say of each here.
OF_STYLE: Mapping[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("power", "lr_end"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "decay_type", "warmup_type", "min_lr_ratio", "num_cycles"),
    ),
}
# `decay_type` of a warmup, a stable rate and a decay; a cosine unless it is written.
DECAY_SHAPES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")
IN_FEW_BITS = (
    *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit"),
    *("ao_adamw_8bit", "ao_adamw_4bit", "ao_adamw_fp8"),
)
PAGED = ("paged_adamw", "paged_adamw_32bit")
BY_FULL_NAME = {"adagrad": "Adagrad", "rmsprop": "RMSprop"}
OURS = {"sgd": "sgd", "muon": "muon", "adamw_anyprecision": "anyprecision_adamw"}

BETAS = ("adam_beta1", "adam_beta2")


def optimizer(entry: Entry) -> None:
    """`optim`: AdamW in one of many kinds, or another."""
    name = str(entry.value)
    if name in (*ADAMW, *PAGED, *IN_FEW_BITS):
        entry.put("train.optimizer", "adamw")
        if name in PAGED:
            entry.explain(
                "states are not paged; train.optimizer_offload: cpu keeps them on the host"
            )
        elif name in IN_FEW_BITS:
            entry.approximated("states are in float32, and not in a few bits")
    elif name in OURS:
        entry.put("train.optimizer", OURS[name])
    elif name in BY_FULL_NAME:
        entry.put("train.optimizer", f"torch.optim.{BY_FULL_NAME[name]}")
        entry.approximated("PyTorch's own, with its own defaults")
    elif name == "adafactor":
        entry.leave_out(
            "the trainer's Adafactor has scale_parameter: false, and PyTorch's scales every step by"
            " the RMS of the weight: torch.optim.Adafactor needs another lr"
        )
    else:
        entry.leave_out(f"it takes {', '.join((*ADAMW[:2], *IN_FEW_BITS, *OURS, *BY_FULL_NAME))}")


def of_adam(key: str) -> Rule:
    """The rule of `adam_beta1`, `adam_beta2` and `adam_epsilon`; `key` is that of the optimizer."""

    def rule(entry: Entry) -> None:
        name = str(entry.get(key, "adamw_torch"))
        if name in (*BY_FULL_NAME, "adafactor", "sgd"):
            entry.no_effect(f"{name} has none")
        elif entry.key in BETAS:
            first, second = entry.get(BETAS[0], 0.9), entry.get(BETAS[1], 0.999)
            entry.put("train.optimizer_kwargs.betas", [first, second])
        else:
            entry.put("train.optimizer_kwargs.eps", entry.value)

    return rule


def schedule(entry: Entry) -> None:
    """`lr_scheduler_type`: all fall to 0 unless their arguments say otherwise."""
    name = str(entry.value)
    if name not in STYLES:
        entry.leave_out(f"it takes {', '.join(STYLES)}")
        return
    entry.put("train.lr_decay_style", STYLES[name])
    if STYLES[name] != "constant" and not entry.draft.has("train.lr_min"):
        # get_polynomial_decay_schedule_with_warmup alone has a floor unasked: lr_end=1e-7.
        entry.put("train.lr_min", 1e-7 if name == "polynomial" else 0.0)
    if STYLES[name] == "wsd" and not entry.draft.has(f"{MORE}.decay_shape"):
        entry.put(f"{MORE}.decay_shape", "cosine")


def require_decay_steps(draft: Draft, type_key: str) -> None:
    """Refuse a stable rate whose decay has no length: transformers' trainer has no default."""
    if draft.value("train.lr_decay_style") == "wsd" and not draft.has(f"{MORE}.decay_steps"):
        draft.set_line(
            type_key,
            "left out",
            "warmup_stable_decay needs num_decay_steps; write it in lr_scheduler_kwargs",
        )


def schedule_arguments(type_key: str, rate_key: str) -> Rule:
    """The rule of `lr_scheduler_kwargs`, beside the keys of the schedule's name and the rate."""

    def rule(entry: Entry) -> None:
        style = str(entry.get(type_key, "linear"))
        written: Any = entry.value
        arguments = dict(cast("dict[str, Any]", written)) if isinstance(written, dict) else {}
        foreign = [name for name in arguments if name not in OF_STYLE.get(style, ())]
        if foreign:
            entry.leave_out(f"{style} takes no {', '.join(foreign)} here")
            return
        if not arguments:
            entry.no_effect("is off")
        waves = style != "warmup_stable_decay" or arguments.get("decay_type", "cosine") == "cosine"
        if not waves and arguments.pop("num_cycles", None) and not arguments:
            entry.no_effect("num_cycles is read with decay_type: cosine alone")
        for name, value in arguments.items():
            _argument(entry, name, value, entry.get(rate_key, 5e-5))

    return rule


def _argument(entry: Entry, name: str, value: Any, rate: Any) -> None:
    if name in ("num_cycles", "power", "timescale"):
        entry.put(f"{MORE}.{name}", value)
    elif name in ("min_lr", "lr_end"):
        entry.put("train.lr_min", value)
    elif name in ("min_lr_rate", "min_lr_ratio"):
        entry.put("train.lr_min", scale_rate(rate, value))
        # With the latter warmup begins there too, and not at 0.
        if name == "min_lr_ratio":
            entry.put("train.lr_start", scale_rate(rate, value))
    elif name == "warmup_type":
        if value != "linear":
            entry.leave_out(f"a warmup of {value} is not computed here; linear is")
        elif not entry.is_handled:
            entry.no_effect("warmup is linear")
    elif name == "num_decay_steps":
        entry.put(f"{MORE}.decay_steps", value)
    elif value in DECAY_SHAPES:
        entry.put(f"{MORE}.decay_shape", DECAY_SHAPES[value])
    else:
        entry.leave_out(f"decay_type takes {', '.join(DECAY_SHAPES)}")


def scale_rate(rate: float, share: float) -> float:
    """A share of a rate, without the last digits that no one wrote."""
    return float(f"{rate * share:.12g}")


def warmup_steps(entry: Entry) -> None:
    """`warmup_steps`: a number, or below 1 a share of all steps."""
    if _ignores_warmup(entry):
        return
    if isinstance(entry.value, float) and 0 < entry.value < 1:
        _share(entry)
    elif entry.value:
        entry.put("train.lr_warmup_steps", int(entry.value))
    else:
        entry.no_effect("0: warmup_ratio says it")


def warmup_ratio(entry: Entry) -> None:
    """`warmup_ratio`, which steps stand before."""
    if _ignores_warmup(entry):
        return
    if entry.get("warmup_steps"):
        entry.no_effect("warmup_steps is written, and overrides it")
    elif entry.value:
        _share(entry)
    else:
        entry.put("train.lr_warmup_ratio", 0.0)


def _ignores_warmup(entry: Entry) -> bool:
    is_so = "constant" in (entry.get("lr_scheduler_type"), entry.get("lr_scheduler"))
    if is_so:
        entry.no_effect("constant begins at its peak; constant_with_warmup does not")
    return is_so


def _share(entry: Entry) -> None:
    # A share of all steps is rounded up there, and down here.
    if has_steps(entry):
        entry.put("train.lr_warmup_steps", math.ceil(entry.get("max_steps") * entry.value))
    else:
        entry.put("train.lr_warmup_ratio", float(entry.value))
        entry.approximated("a share of all steps is rounded down here, and up there")
