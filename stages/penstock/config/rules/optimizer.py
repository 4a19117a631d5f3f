"""Invalid combinations of optimizer, schedule and precision settings that a declaration cannot
say."""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from penstock.config.loading.fault import ConfigIssue, Issues, shown
from penstock.config.schema.memory import RESULT_DTYPES, STOCHASTIC
from penstock.config.schema.optimizer import ENDING, KWARGS
from penstock.config.schema.run import RunConfig
from penstock.core.extensions import OPTIMIZERS

# Element-wise optimizers besides those of `KWARGS`: they work on shards of a tensor.
ELEMENTWISE = tuple(
    f"torch.optim.{name}"
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)

# Dtypes in settings to torch's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _is_number(value: Any) -> bool:
    # bool is a subclass of int.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and math.isfinite(value)


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and value < 1


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_fraction, value))  # pyright: ignore[reportUnknownArgumentType]


Check = tuple[Callable[[Any], bool], str]
BETAS: Check = (_are_betas, "two numbers from 0 to below 1, such as [0.9, 0.95]")
NUMBER: Check = (_is_number, "a number of 0 or more")
FRACTION: Check = (_is_fraction, "a number from 0 to below 1")
BOOL: Check = (lambda value: isinstance(value, bool), "true or false")

# Values of `optimizer_kwargs`.
ARGUMENTS: Mapping[str, Check] = {
    **{"betas": BETAS, "eps": NUMBER, "momentum": FRACTION, "dampening": NUMBER},
    **dict.fromkeys(("use_kahan_summation", "nesterov", "grad_averaging", "amsgrad"), BOOL),
}


def check_optimizer_kwargs(run: RunConfig) -> Issues:
    """Unknown or invalid `optimizer_kwargs`."""
    name, arguments = run.train.optimizer, run.train.optimizer_kwargs
    allowed = KWARGS.get(name)
    if allowed is None:
        return
    for argument, value in arguments.items():
        path = ("train", "optimizer_kwargs", argument)
        if argument not in allowed:
            near = get_close_matches(argument, allowed, 1, 0.5)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield ConfigIssue(
                path, f"{name} takes {' and '.join(allowed)}{meant}", ("train.optimizer",)
            )
        elif not ARGUMENTS[argument][0](value):
            why = f"is {shown(value)}; write {ARGUMENTS[argument][1]}"
            yield ConfigIssue(path, why, ("train.optimizer",))
    nesterov = arguments.get("nesterov") is True
    if name == "sgd" and nesterov and (not arguments.get("momentum") or arguments.get("dampening")):
        yield ConfigIssue(
            ("train", "optimizer_kwargs", "nesterov"),
            "needs momentum above 0 and no dampening; write {momentum: 0.9, nesterov: true}",
            ("train.optimizer",),
        )


def _check_sharded_optimizer(run: RunConfig) -> Issues:
    train, name = run.train, run.train.optimizer
    if name in KWARGS or name in ELEMENTWISE:
        return
    if "." not in name and getattr(OPTIMIZERS.load(name), "elementwise", False):
        return
    layouts = {
        "data_parallel_mode": (train.data_parallel_mode == "fsdp2", "none or ddp"),
        "tensor_parallel_size": (train.tensor_parallel_size > 1, "1"),
        "expert_parallel_size": (train.expert_parallel_size > 1, "1"),
    }
    for setting, (shards, instead) in layouts.items():
        if shards:
            yield ConfigIssue(
                ("train", "optimizer"),
                f"{name} may need full matrices, which {setting}: {getattr(train, setting)} shards"
                f" over ranks; write {setting}: {instead}, or another optimizer",
                (f"train.{setting}",),
            )
            return


def _check_part_lrs(run: RunConfig) -> Issues:
    train, lora = run.train, run.lora.enable_lora
    frozen = ["vision", "projector"] if run.model.freeze is None else run.model.freeze
    for part, lr in (("vision", train.vision_lr), ("projector", train.projector_lr)):
        name = f"{part}_lr"
        if lr is None:
            continue
        if part in frozen and not lora:
            yield ConfigIssue(
                ("train", name),
                f"is of the {part}, which is frozen; write model.freeze: [] or a list without"
                f" {part}, or leave {name} out",
                ("model.freeze", "lora.enable_lora"),
            )
        elif not train.lr:
            yield ConfigIssue(
                ("train", "lr"),
                f"is 0, and {name} follows its schedule as a multiple of it; write an lr above 0",
            )


def _check_schedule(run: RunConfig) -> Issues:
    train, more, style = run.train, run.train.lr_schedule_kwargs, run.train.lr_decay_style
    if style not in ("constant", "noam") and train.lr_min > train.lr:
        yield ConfigIssue(
            ("train", "lr_min"),
            f"the {style} decay would rise from lr ({train.lr:g}) to lr_min"
            f" ({train.lr_min:g}); write an lr_min of at most {train.lr:g}",
            ("train.lr", "train.lr_decay_style"),
        )
    decays = style in ENDING and train.lr_warmup_steps is None
    if decays and train.lr_warmup_ratio > train.lr_decay_ratio:
        yield ConfigIssue(
            ("train", "lr_warmup_ratio"),
            f"the warmup ends at {train.lr_warmup_ratio:g} of all steps, after the decay's end"
            f" (lr_decay_ratio {train.lr_decay_ratio:g}); write a smaller lr_warmup_ratio",
            ("train.lr_decay_ratio", "train.lr_decay_style"),
        )
    if style == "wsd" and more.decay_shape != "cosine" and more.is_non_default("num_cycles"):
        yield ConfigIssue(
            ("train", "lr_schedule_kwargs", "num_cycles"),
            f"is for a cosine, and decay_shape is {more.decay_shape}; write decay_shape: cosine, or"
            " leave num_cycles out",
            ("train.lr_schedule_kwargs.decay_shape",),
        )


def _check_grad_accum_dtype(run: RunConfig) -> Issues:
    train, path = run.train, ("train", "grad_accum_dtype")
    dtype, reads = train.grad_accum_dtype, ("train.data_parallel_mode",)
    if not dtype:
        return
    if train.data_parallel_mode == "fsdp2":
        if dtype != train.fsdp_reduce_dtype:
            yield ConfigIssue(
                path,
                "fsdp2 accumulates gradients in the dtype of their reduction, and fsdp_reduce_dtype"
                f" is {train.fsdp_reduce_dtype}; write fsdp_reduce_dtype: {dtype} as well",
                ("train.fsdp_reduce_dtype", *reads),
            )
        return
    if DTYPES[dtype] == train.keeps_in:
        return
    reads += ("train.precision", "train.optimizer")
    if schedule := train.split_backward_schedule:
        yield ConfigIssue(
            path,
            f"pipeline_parallel_schedule: {schedule} accumulates gradients in the dtype of weights,"
            f" which is {train.keeps_in}; write data_parallel_mode: fsdp2, or leave"
            " grad_accum_dtype out",
            (*reads, "train.pipeline_parallel_schedule", "train.pipeline_parallel_size"),
        )
    elif dtype == "bf16" and train.optimizer not in STOCHASTIC:
        yield ConfigIssue(
            path,
            f"{train.optimizer} needs gradients in the dtype of weights, which is"
            f" {train.keeps_in}; write optimizer: {', '.join(STOCHASTIC[:-1])} or {STOCHASTIC[-1]},"
            " or leave grad_accum_dtype out",
            reads,
        )


def _check_kahan_summation(run: RunConfig) -> Issues:
    train = run.train
    in_bf16 = train.keeps_in == "bfloat16"
    if train.optimizer_kwargs.get("use_kahan_summation") and (
        not in_bf16 or train.stochastic_rounding
    ):
        why = (
            "compensates rounding errors of weights, and so does stochastic_rounding; leave one of"
            " the two out"
            if in_bf16
            else "compensates rounding errors of bfloat16 weights, and weights are in float32;"
            " write train.precision: bf16, or leave it out"
        )
        path = ("train", "optimizer_kwargs", "use_kahan_summation")
        yield ConfigIssue(path, why, (*RESULT_DTYPES, "train.master_weights"))


OPTIM_RULES = (
    check_optimizer_kwargs,
    _check_sharded_optimizer,
    _check_part_lrs,
    _check_schedule,
    _check_grad_accum_dtype,
    _check_kahan_summation,
)
