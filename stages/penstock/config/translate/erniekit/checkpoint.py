"""ERNIEKit's run: how long it is, and when it is measured and saved."""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.fit_parallel_sizes import EVAL_ROWS
from penstock.config.translate.shared import has_steps
from penstock.config.translate.translation import Entry, Rule

# Keys of the rows that a rank evaluates at once: as many as it trains on, if none are written.
ROWS = ("per_device_eval_batch_size", "batch_size", "per_device_train_batch_size")

NO_EVALUATION = "do_eval is false, so nothing is evaluated"


def evaluates(entry: Entry) -> bool:
    """Whether the file asks for evaluations."""
    return bool(entry.get("do_eval"))


def _by_steps_or_epochs(entry: Entry, name: str, chosen: str) -> None:
    steps, epochs = 0, 0.0
    if chosen == "steps":
        # As written; else what their program takes, where steps are asked for.
        usual = 500 if name == "save" else entry.get("logging_steps", 500)
        steps = entry.get(f"{name}_steps", 0 if entry.is_assumed else usual)
    elif chosen == "epoch" and has_steps(entry):
        steps = max(1, int(entry.get("max_steps") / entry.get("num_train_epochs", 1)))
        entry.explain("with max_steps an epoch is that share of them")
    elif chosen == "epoch":
        epochs = 1.0
    elif chosen != "no":
        entry.leave_out("it takes no, steps, epoch")
        return
    entry.put(f"train.{name}_steps", steps)
    entry.put(f"train.{name}_epochs", epochs)


def _save(entry: Entry) -> None:
    chosen = entry.value
    if entry.is_assumed and "save_steps" in entry.draft.written:
        chosen = "steps"
        entry.explain("save_steps is written, so steps")
    _by_steps_or_epochs(entry, "save", chosen)


def _evaluate(entry: Entry) -> None:
    if not evaluates(entry):
        entry.no_effect(NO_EVALUATION)
    elif entry.get("do_train", True) is False:
        entry.no_effect("do_train is false, so there is one evaluation")
    else:
        _by_steps_or_epochs(entry, "eval", entry.value)


def _interval(entry: Entry) -> None:
    # The number of steps that a strategy asks for.
    name = entry.key.removesuffix("_steps")
    strategy = "save_strategy" if name == "save" else "evaluation_strategy"
    chosen = entry.draft.written.get(strategy, "steps")
    if name == "eval" and not evaluates(entry):
        entry.no_effect(NO_EVALUATION)
    elif chosen == "steps":
        entry.decides(f"train.{name}_steps")
    else:
        entry.no_effect(f"{strategy} is {chosen}")


def _do_eval(entry: Entry) -> None:
    entry.put("train.eval_at_end", bool(entry.value))
    if not entry.value:
        entry.explain("nothing is held out and nothing evaluated")


def _do_train(entry: Entry) -> None:
    if entry.value:
        entry.put("train.eval_only", False)
        if entry.is_assumed:
            entry.explain("their program trains only where it is written")
    elif entry.get("do_eval"):
        entry.put("train.eval_only", True)
    else:
        entry.refuse(
            "the file neither trains nor evaluates; write do_train: true, or do_eval: true with"
            " eval_dataset_path"
        )


def _eval_batches(entry: Entry) -> None:
    if not evaluates(entry):
        entry.no_effect(NO_EVALUATION)
    elif entry.value > 0:
        entry.put("train.eval_max_batches", entry.value)
        # Of one replica here; the number of replicas is known when sizes are fitted.
        rows: list[Any] = [entry.get(key) for key in ROWS if entry.get(key)]
        entry.put(EVAL_ROWS, rows[0] if rows else 1)
        entry.explain("a batch has per_device_eval_batch_size rows of each data-parallel rank")
    else:
        entry.put("train.eval_max_batches", None)


ASYNC = {"async_save", "enable_all_options"}
MASTER = {"skip_save_model_weight", "enable_all_options"}
COMPUTE = {"remove_master_weight", "master_weight_compatible"}
IN_PARTS = {"ignore_merge_optimizer"}


def _unified_config(entry: Entry) -> None:
    options = set(str(entry.value).replace(",", " ").split())
    if options & ASYNC:
        entry.put("train.save_async", True)
    if options & (MASTER | COMPUTE):
        entry.put("train.ckpt_weights", "master" if options & MASTER else "compute")
    if unknown := sorted(options - ASYNC - MASTER - COMPUTE - IN_PARTS):
        entry.approximated(f"{', '.join(unknown)} cannot be set for checkpoints here")
    elif not entry.is_handled:
        entry.no_effect("every rank saves its own part of weights and states")


COMPRESSIONS = {"O1": "int8", "O2": "int4"}


def _quantized_states(entry: Entry) -> None:
    if entry.value:
        entry.put("train.ckpt_quant", "none")
    elif entry.get("ckpt_quant_stage", "O0") in COMPRESSIONS:
        entry.decides("train.ckpt_quant")
    else:
        entry.no_effect("ckpt_quant_stage says in how many bits; without it none are lost")


def _quantized_stage(entry: Entry) -> None:
    if entry.get("disable_ckpt_quant"):
        entry.no_effect("disable_ckpt_quant is true")
    elif entry.get("ignore_save_lr_and_optim"):
        entry.no_effect("ignore_save_lr_and_optim leaves states out")
    elif entry.value in COMPRESSIONS:
        entry.put("train.ckpt_quant", COMPRESSIONS[entry.value])
        entry.explain("in our own form of so many bits")
    elif entry.value == "O0":
        entry.no_effect("states are saved as they are")
    else:
        entry.leave_out("it takes O0, O1, O2")


SAVING: Mapping[str, Rule] = {
    "max_steps": rule.when(
        lambda entry: entry.value > 0,
        rule.put("train.max_steps"),
        rule.sets({"train.max_steps": None}, "as many steps as num_train_epochs has"),
    ),
    "save_strategy": _save,
    **dict.fromkeys(("save_steps", "eval_steps"), _interval),
    "evaluation_strategy": _evaluate,
    "do_eval": _do_eval,
    "do_train": _do_train,
    "max_evaluate_steps": _eval_batches,
    "per_device_eval_batch_size": rule.when(
        evaluates, rule.put("train.eval_micro_batch_size"), NO_EVALUATION
    ),
    "save_total_limit": rule.put(
        "train.save_total_limit", lambda count: count if count > 0 else None
    ),
    "overwrite_output_dir": rule.put(
        "train.load_checkpoint_path", lambda overwrites: None if overwrites else "auto"
    ),
    "resume_from_checkpoint": rule.put("train.load_checkpoint_path"),
    "unified_checkpoint": rule.sets(
        {"train.ckpt_manager": "dcp"},
        "checkpoints can be read in any layout, and are saved in parts",
    ),
    "unified_checkpoint_config": _unified_config,
    "disable_ckpt_quant": _quantized_states,
    "ckpt_quant_stage": _quantized_stage,
    "ignore_save_lr_and_optim": rule.put("train.save_optimizer", lambda left_out: not left_out),
    "ignore_load_lr_and_optim": rule.when(
        lambda entry: not (entry.value and entry.get("overwrite_output_dir")),
        rule.put("train.load_optimizer", lambda left_out: not left_out),
        "overwrite_output_dir is true, so the run starts from scratch",
    ),
}
