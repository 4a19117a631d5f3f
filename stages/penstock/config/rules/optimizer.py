"""Combinations of settings of optimizers, schedules and precision that cannot be honoured."""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from penstock.config.loading.fault import ConfigIssue, shown
from penstock.config.rules.data import Faults
from penstock.config.schema.lr_schedule import ENDING, READ_BY
from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.run import RunConfig

OF_EACH_NUMBER = tuple(
    f"torch.optim.{name}"
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Of others, those that step each number by itself, so that it is no matter who holds which."""

OF_MUON = ("muon_lr", "muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_adjust_lr_fn")

ROUNDING = ("adamw", "anyprecision_adamw", "muon", "novograd")
"""Optimizers that round at random."""


PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of settings to torch's."""


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_number(value: Any) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and value >= 0 and math.isfinite(value)


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_share, value))  # pyright: ignore[reportUnknownArgumentType]


Check = tuple[Callable[[Any], bool], str]
BETAS: Check = (_are_betas, "two numbers from 0 to below 1, such as [0.9, 0.95]")
NUMBER: Check = (_is_number, "a number of 0 or more")
SHARE: Check = (_is_share, "a number from 0 to below 1")
TRUTH: Check = (lambda value: isinstance(value, bool), "true or false")

ARGUMENTS: Mapping[str, Mapping[str, Check]] = {
    "adamw": {"betas": BETAS, "eps": NUMBER},
    "anyprecision_adamw": {"betas": BETAS, "eps": NUMBER, "use_kahan_summation": TRUTH},
    "sgd": {"momentum": SHARE, "dampening": NUMBER, "nesterov": TRUTH},
    "muon": {"betas": BETAS, "eps": NUMBER},
    "novograd": {"betas": BETAS, "eps": NUMBER, "grad_averaging": TRUTH, "amsgrad": TRUTH},
}
"""What each optimizer of one word takes in `optimizer_kwargs`."""


def arguments_are_the_optimizers(run: RunConfig) -> Faults:
    """`optimizer_kwargs` that the optimizer does not take, or not so."""
    name, given = run.train.optimizer, run.train.optimizer_kwargs
    known = ARGUMENTS.get(name)
    if known is None:
        return
    for argument, value in given.items():
        path = ("train", "optimizer_kwargs", argument)
        if argument not in known:
            near = get_close_matches(argument, known, 1, 0.5)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield ConfigIssue(
                path, f"{name} takes {' and '.join(known)}{meant}", ("train.optimizer",)
            )
        elif not known[argument][0](value):
            yield ConfigIssue(
                path,
                f"is {shown(value)}; write {known[argument][1]}",
                ("train.optimizer",),
            )
    nesterov = given.get("nesterov") is True
    if name == "sgd" and nesterov and (not given.get("momentum") or given.get("dampening")):
        yield ConfigIssue(
            ("train", "optimizer_kwargs", "nesterov"),
            "needs momentum above 0 and no dampening; write {momentum: 0.9, nesterov: true}",
            ("train.optimizer",),
        )


def _the_optimizer_can_do_with_parts(run: RunConfig) -> Faults:
    train, name = run.train, run.train.optimizer
    if name in ARGUMENTS or name in OF_EACH_NUMBER:
        return
    wholes = {
        "data_parallel_mode": (train.data_parallel_mode == "fsdp2", "none or ddp"),
        "tensor_parallel_size": (train.tensor_parallel_size > 1, "1"),
        "expert_parallel_size": (train.expert_parallel_size > 1, "1"),
    }
    for setting, (divides, instead) in wholes.items():
        if divides:
            yield ConfigIssue(
                ("train", "optimizer"),
                f"{name} keeps something of whole matrices, of which {setting}:"
                f" {getattr(train, setting)} gives a rank a part; write {setting}: {instead}, or"
                " another optimizer",
                (f"train.{setting}",),
            )
            return


def _settings_of_muon_are_for_muon(run: RunConfig) -> Faults:
    train = run.train
    if train.optimizer == "muon":
        if not train.lr:
            yield ConfigIssue(
                ("train", "lr"),
                "is 0, and muon_lr follows its schedule, as a multiple of it; write an lr above 0",
                ("train.optimizer",),
            )
        return
    for name in OF_MUON:
        if train.asks_for(name):
            yield ConfigIssue(
                ("train", name),
                f"is read by muon alone, and the optimizer is {train.optimizer}; write optimizer:"
                f" muon, or leave {name} out",
                ("train.optimizer",),
            )


def _decay_falls(run: RunConfig) -> Faults:
    train = run.train
    if train.lr_decay_style not in ("constant", "noam") and train.lr_min > train.lr:
        yield ConfigIssue(
            ("train", "lr_min"),
            f"the {train.lr_decay_style} decay would rise from lr ({train.lr:g}) to lr_min"
            f" ({train.lr_min:g}); write an lr_min of at most {train.lr:g}",
            ("train.lr", "train.lr_decay_style"),
        )


def _warmup_is_written_once(run: RunConfig) -> Faults:
    train = run.train
    if train.lr_warmup_steps is not None and train.lr_warmup_ratio:
        yield ConfigIssue(
            ("train", "lr_warmup_ratio"),
            "lr_warmup_steps is given too; leave one of the two out",
            ("train.lr_warmup_steps",),
        )


def _warmup_ends_before_decay(run: RunConfig) -> Faults:
    train = run.train
    decays = train.lr_decay_style in ENDING and train.lr_warmup_steps is None
    if decays and train.lr_warmup_ratio > train.lr_decay_ratio:
        yield ConfigIssue(
            ("train", "lr_warmup_ratio"),
            f"the warmup ends at {train.lr_warmup_ratio:g} of all steps, after the decay's end"
            f" (lr_decay_ratio {train.lr_decay_ratio:g}); write a smaller lr_warmup_ratio",
            ("train.lr_decay_ratio", "train.lr_decay_style"),
        )


def _the_schedule_reads_what_is_written(run: RunConfig) -> Faults:
    train = run.train
    more, style = train.lr_schedule_kwargs, train.lr_decay_style
    for name, styles in READ_BY.items():
        if style not in styles and more.asks_for(name):
            yield ConfigIssue(
                ("train", "lr_schedule_kwargs", name),
                f"is nothing to lr_decay_style: {style}; write {' or '.join(styles)}, or leave"
                f" {name} out",
                ("train.lr_decay_style",),
            )
    if style != "constant" and style not in ENDING and train.asks_for("lr_decay_ratio"):
        yield ConfigIssue(
            ("train", "lr_decay_ratio"),
            f"lr_decay_style: {style} falls on to the end of the run; leave lr_decay_ratio out",
            ("train.lr_decay_style",),
        )
    if style == "wsd" and more.decay_shape != "cosine" and more.asks_for("num_cycles"):
        yield ConfigIssue(
            ("train", "lr_schedule_kwargs", "num_cycles"),
            f"are waves of a cosine, and decay_shape is {more.decay_shape}; write decay_shape:"
            " cosine, or leave num_cycles out",
            ("train.lr_schedule_kwargs.decay_shape",),
        )
    warms = train.lr_warmup_steps or (train.lr_warmup_steps is None and train.lr_warmup_ratio)
    is_shared = more.warmup_style == "plus_one" and style not in ("noam", "inverse_sqrt")
    if is_shared and not warms:
        yield ConfigIssue(
            ("train", "lr_schedule_kwargs", "warmup_style"),
            "there is no warmup; write lr_warmup_steps or lr_warmup_ratio, or leave it out",
            ("train.lr_warmup_steps", "train.lr_warmup_ratio"),
        )
    if style == "noam" and (train.lr_start or more.warmup_style != "zero_start"):
        name = "lr_start" if train.lr_start else "warmup_style"
        yield ConfigIssue(
            ("train", name) if train.lr_start else ("train", "lr_schedule_kwargs", name),
            f"noam has a warmup of its own; leave {name} out",
            ("train.lr_decay_style",),
        )


def _precisions_agree(run: RunConfig) -> Faults:
    train = run.train
    precision = train.precision or ""
    if precision.endswith("_mixed") and not train.enable_mixed_precision:
        yield ConfigIssue(
            ("train", "precision"),
            f"{precision} mixes precisions, and enable_mixed_precision is false; leave"
            " enable_mixed_precision out",
            ("train.enable_mixed_precision",),
        )
    if train.master_weights is False and train.computes_in != "bfloat16":
        yield ConfigIssue(
            ("train", "master_weights"),
            f"false keeps weights in bfloat16, and this run computes in {train.computes_in}; write"
            " precision: bf16, or leave master_weights out",
            ("train.precision", "train.enable_mixed_precision"),
        )
    if train.computes_in != "float16" and train.asks_for("loss_scale_init"):
        yield ConfigIssue(
            ("train", "loss_scale_init"),
            f"the loss is scaled in float16 alone, and this run computes in {train.computes_in};"
            " write precision: fp16_mixed, or leave loss_scale_init out",
            ("train.precision", "train.enable_mixed_precision"),
        )


def _gradients_are_added_up_in_one_precision(run: RunConfig) -> Faults:
    train = run.train
    wanted = train.grad_accum_dtype
    if wanted and train.data_parallel_mode == "fsdp2" and wanted != train.fsdp_reduce_dtype:
        yield ConfigIssue(
            ("train", "grad_accum_dtype"),
            f"fsdp2 adds gradients up as it sums them over ranks, and fsdp_reduce_dtype is"
            f" {train.fsdp_reduce_dtype}; write fsdp_reduce_dtype: {wanted} as well",
            ("train.fsdp_reduce_dtype", "train.data_parallel_mode"),
        )


def _gradients_can_be_added_up_so(run: RunConfig) -> Faults:
    train = run.train
    wanted, mode = train.grad_accum_dtype, train.data_parallel_mode
    if mode == "fsdp2" or not wanted or PRECISIONS[wanted] == train.keeps_in:
        return
    reads = ("train.data_parallel_mode", "train.precision", "train.optimizer")
    schedule = train.pipeline_parallel_schedule
    if train.pipeline_parallel_size > 1 and schedule in SPLIT_BACKWARD:
        yield ConfigIssue(
            ("train", "grad_accum_dtype"),
            f"pipeline_parallel_schedule: {schedule} adds gradients up in the precision of weights,"
            f" which is {train.keeps_in}; write data_parallel_mode: fsdp2, or leave"
            " grad_accum_dtype out",
            (*reads, "train.pipeline_parallel_schedule", "train.pipeline_parallel_size"),
        )
    elif wanted == "bf16" and train.optimizer not in ROUNDING:
        yield ConfigIssue(
            ("train", "grad_accum_dtype"),
            f"{train.optimizer} takes gradients in the precision of weights, which is"
            f" {train.keeps_in}; write optimizer: {', '.join(ROUNDING[:-1])} or {ROUNDING[-1]}, or"
            " leave grad_accum_dtype out",
            reads,
        )


def _what_is_rounded_is_kept_in_bf16(run: RunConfig) -> Faults:
    train = run.train
    in_bf16 = train.keeps_in == "bfloat16"
    reads = ("train.precision", "train.optimizer", "train.optimizer_dtype", "train.master_weights")
    if train.optimizer_kwargs.get("use_kahan_summation") and (
        not in_bf16 or train.stochastic_rounding
    ):
        why = (
            "keeps what rounding takes from weights, and stochastic_rounding rounds them at random"
            " instead; leave one of the two out"
            if in_bf16
            else "keeps what rounding takes from weights, which are kept in float32; write"
            " train.precision: bf16, or leave it out"
        )
        yield ConfigIssue(("train", "optimizer_kwargs", "use_kahan_summation"), why, reads)
    if not train.stochastic_rounding:
        return
    states = train.optimizer != "adamw" and train.optimizer_dtype == "bf16"
    if train.optimizer not in ROUNDING:
        yield ConfigIssue(
            ("train", "stochastic_rounding"),
            f"{train.optimizer} rounds to the nearest; write optimizer: {', '.join(ROUNDING[:-1])}"
            f" or {ROUNDING[-1]}, or leave stochastic_rounding out",
            reads,
        )
    elif not in_bf16 and not states:
        yield ConfigIssue(
            ("train", "stochastic_rounding"),
            "the optimizer keeps weights and states in float32, and rounds nothing; write"
            " precision: bf16, or leave stochastic_rounding out",
            reads,
        )


OPTIM_RULES = (
    arguments_are_the_optimizers,
    _the_optimizer_can_do_with_parts,
    _settings_of_muon_are_for_muon,
    _decay_falls,
    _warmup_is_written_once,
    _warmup_ends_before_decay,
    _the_schedule_reads_what_is_written,
    _precisions_agree,
    _gradients_are_added_up_in_one_precision,
    _gradients_can_be_added_up_so,
    _what_is_rounded_is_kept_in_bf16,
)
