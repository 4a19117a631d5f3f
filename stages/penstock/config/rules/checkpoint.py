"""Combinations of settings of checkpoints that cannot be honoured."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Faults
from penstock.config.schema.run import RunConfig

COMPRESSED = ("adamw", "anyprecision_adamw")
"""Optimizers whose states `ckpt_quant` compresses."""

LOADED = ("train.load_checkpoint_path",)


def _what_is_said_of_a_checkpoint_is_said_of_one(run: RunConfig) -> Faults:
    train = run.train
    path = train.load_checkpoint_path
    if not train.load_optimizer and path is None:
        yield ConfigIssue(
            ("train", "load_optimizer"),
            "false speaks of the checkpoint that load_checkpoint_path means, and none is meant;"
            " write load_checkpoint_path: auto to mean the run's own, or leave load_optimizer out",
            LOADED,
        )
    if train.require_checkpoint and path != "auto":
        why = "none is looked for" if path is None else "one that is named is required anyway"
        yield ConfigIssue(
            ("train", "require_checkpoint"),
            f"{why}; write load_checkpoint_path: auto, or leave require_checkpoint out",
            LOADED,
        )


def _a_run_starts_from_one_checkpoint(run: RunConfig) -> Faults:
    train = run.train
    if train.init_checkpoint_path and train.load_checkpoint_path not in (None, "auto"):
        yield ConfigIssue(
            ("train", "init_checkpoint_path"),
            "load_checkpoint_path names another start; leave one of the two out, or write"
            " load_checkpoint_path: auto to go on from the run's own checkpoints",
            LOADED,
        )


def _only_what_is_saved_is_compressed(run: RunConfig) -> Faults:
    train = run.train
    if train.ckpt_quant == "none":
        return
    if not train.save_optimizer:
        yield ConfigIssue(
            ("train", "ckpt_quant"),
            "compresses what save_optimizer: false leaves out; leave one of the two out",
            ("train.save_optimizer",),
        )
    if train.optimizer not in COMPRESSED:
        yield ConfigIssue(
            ("train", "ckpt_quant"),
            f"compresses the moments of {' and '.join(COMPRESSED)}, and the optimizer is"
            f" {train.optimizer}; write none",
            ("train.optimizer",),
        )


CHECKPOINT_RULES = (
    _what_is_said_of_a_checkpoint_is_said_of_one,
    _a_run_starts_from_one_checkpoint,
    _only_what_is_saved_is_compressed,
)
