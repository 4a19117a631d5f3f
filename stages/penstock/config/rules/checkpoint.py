"""Invalid combinations of checkpoint settings."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Issues
from penstock.config.schema.run import RunConfig

QUANTIZABLE = ("adamw", "anyprecision_adamw")
"""Optimizers whose states `ckpt_quant` quantizes."""

READS = ("train.load_checkpoint_path",)


def _check_load_options(run: RunConfig) -> Issues:
    train = run.train
    path = train.load_checkpoint_path
    if not train.load_optimizer and path is None:
        yield ConfigIssue(
            ("train", "load_optimizer"),
            "false is an option of load_checkpoint_path, which is not set; write"
            " load_checkpoint_path: auto for the run's own checkpoints, or leave load_optimizer"
            " out",
            READS,
        )
    if train.require_checkpoint and path != "auto":
        why = "no checkpoint is loaded" if path is None else "a named checkpoint is required anyway"
        yield ConfigIssue(
            ("train", "require_checkpoint"),
            f"{why}; write load_checkpoint_path: auto, or leave require_checkpoint out",
            READS,
        )


def _check_init_checkpoint(run: RunConfig) -> Issues:
    train = run.train
    if train.init_checkpoint_path and train.load_checkpoint_path not in (None, "auto"):
        yield ConfigIssue(
            ("train", "init_checkpoint_path"),
            "load_checkpoint_path names another checkpoint; leave one of the two out, or write"
            " load_checkpoint_path: auto to resume from the run's own checkpoints",
            READS,
        )


def _check_ckpt_quant(run: RunConfig) -> Issues:
    train = run.train
    if train.ckpt_quant == "none":
        return
    if not train.save_optimizer:
        yield ConfigIssue(
            ("train", "ckpt_quant"),
            "quantizes optimizer states, which save_optimizer: false does not save; leave one of"
            " the two out",
            ("train.save_optimizer",),
        )
    if train.optimizer not in QUANTIZABLE:
        yield ConfigIssue(
            ("train", "ckpt_quant"),
            f"quantizes the moments of {' and '.join(QUANTIZABLE)}, and the optimizer is"
            f" {train.optimizer}; write none",
            ("train.optimizer",),
        )


CHECKPOINT_RULES = (
    _check_load_options,
    _check_init_checkpoint,
    _check_ckpt_quant,
)
