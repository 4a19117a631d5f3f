"""The arguments of Hugging Face's trainer, which several tools pass on under the same names."""

import re
from collections.abc import Mapping
from typing import Any, cast

from penstock.config.translate import rule
from penstock.config.translate.dialect import Table, by_reason, listed, same_names
from penstock.config.translate.hf import schedule
from penstock.config.translate.shared import IN_ORDER, OF_PYTHON, events_folder, has_steps, reports
from penstock.config.translate.translation import Draft, Entry, Rule

# Settings that speak of evaluations.
EVALUATING = (
    *("eval_steps", "eval_epochs", "eval_at_start", "eval_sanity_batches", "eval_max_batches"),
    *("eval_micro_batch_size", "early_stopping", "save_best"),
)

STRATEGIES = ("no", "steps", "epoch")
STAGE_IN_NAME = re.compile(r"(?:zero|z)[-_]?([0-3])")


def _decay(entry: Entry) -> None:
    entry.put("train.weight_decay", entry.value)
    if entry.value:
        # Trainer.get_decay_parameter_names leaves out biases and layers of the norms' types.
        entry.put("train.no_decay_params", ["bias", "norm"])


def _log_steps(entry: Entry) -> None:
    if isinstance(entry.value, float) and entry.value < 1:
        entry.approximated("every step is logged; metrics.jsonl always has all steps")
    else:
        entry.put("train.log_interval", int(entry.value))


def _every(entry: Entry, strategy: str, kind: str, count: Any) -> None:
    # Put how often something happens; `kind` is `eval` or `save`.
    if strategy == "epoch":
        entry.put(f"train.{kind}_epochs", 1.0)
    elif isinstance(count, float) and count < 1:
        if has_steps(entry):
            entry.put(f"train.{kind}_steps", max(1, int(count * entry.get("max_steps"))))
        else:
            entry.put(f"train.{kind}_epochs", count * entry.get("num_train_epochs", 3))
    else:
        entry.put(f"train.{kind}_steps", int(count))


def _evaluations(entry: Entry) -> None:
    name = str(entry.value)
    if name == "no":
        entry.put("train.eval_steps", 0)
    elif name in STRATEGIES:
        # TrainingArguments takes logging_steps where eval_steps is not written.
        _every(entry, name, "eval", entry.get("eval_steps") or entry.get("logging_steps", 500))
    else:
        entry.leave_out(f"it takes {', '.join(STRATEGIES)}")


def savings(entry: Entry) -> None:
    """`save_strategy`; ours saves by epochs unless that is 0."""
    name = str(entry.value)
    entry.put("train.save_epochs", 0.0)
    if name == "no":
        entry.put("train.save_steps", 0)
    elif name == "best":
        entry.put("train.save_best.metric", "eval_loss")
    elif name in STRATEGIES:
        _every(entry, name, "save", entry.get("save_steps", 500))
    else:
        entry.leave_out(f"it takes {', '.join((*STRATEGIES, 'best'))}")


def _best(entry: Entry) -> None:
    if not entry.value:
        entry.no_effect("the last checkpoint is the result")
        return
    metric = str(entry.get("metric_for_best_model") or "eval_loss")
    # The trainer, too, adds the prefix to a metric that has none.
    entry.put("train.save_best.metric", metric if metric.startswith("eval_") else f"eval_{metric}")
    greater = entry.get("greater_is_better")
    if greater is not None:
        entry.put("train.save_best.mode", "max" if greater else "min")


def _resuming(entry: Entry) -> None:
    if entry.value is True:
        entry.put("train.load_checkpoint_path", "auto")
    elif not entry.value:
        entry.no_effect("nothing is resumed")
    else:
        entry.put("train.load_checkpoint_path", entry.value)
        entry.approximated("a trainer's checkpoint is not read; name one of a run made here")


def _in_bits(entry: Entry) -> None:
    if entry.value not in (True, False, "auto", "full"):
        raise ValueError("it takes true, false, auto and full")
    if entry.get("fp16") is True:
        entry.put("train.precision", "fp16_mixed")
    elif entry.get("bf16") in (True, "auto"):
        entry.put("train.precision", "bf16_mixed")
    else:
        entry.put("train.precision", "fp32")


def _pushing(entry: Entry) -> None:
    if not entry.value:
        entry.no_effect("nothing is pushed")
    elif entry.get("hub_model_id"):
        entry.decides("push.repo_id")
    else:
        entry.approximated("write push.repo_id: a push names its repository here")


def _deepspeed(entry: Entry) -> None:
    value = entry.value
    if isinstance(value, dict):
        zero: Any = cast("dict[str, Any]", value).get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        if any("offload" in name for name in zero):
            entry.put("train.enable_fsdp_offload", True)
    else:
        match = STAGE_IN_NAME.search(str(value))
        stage = int(match[1]) if match else 3
    if stage:
        entry.put("train.zero_stage", stage)
    else:
        # Stage 0 of DeepSpeed shards nothing.
        entry.put("train.data_parallel_mode", "ddp")
    entry.approximated("only the ZeRO stage of the file is used, from its name or the mapping")


def _fsdp(entry: Entry) -> None:
    options = " ".join(map(str, listed(entry.value)))
    if options in ("", "False"):
        entry.no_effect("is off")
        return
    entry.put("train.data_parallel_mode", "fsdp2")
    # SHARD_GRAD_OP keeps weights gathered from the forward to the backward pass, as ZeRO 2 does.
    entry.put("train.zero_stage", 2 if "shard_grad_op" in options else 3)
    if "offload" in options:
        entry.put("train.enable_fsdp_offload", True)


def determinism(entry: Entry) -> None:
    """`full_determinism`, which makes kernels wait there too."""
    entry.put("train.enable_full_determinism", bool(entry.value))
    # enable_full_determinism of transformers 5.23 sets CUDA_LAUNCH_BLOCKING=1.
    if entry.value:
        entry.put("train.allow_cuda_launch_blocking", True)


def settle_evaluations(draft: Draft) -> None:
    """Without data to evaluate on, all that speaks of evaluations is left out."""
    if not draft.value("data.test_datasets") and not draft.value("data.val_set_size"):
        for name in EVALUATING:
            draft.drop(f"train.{name}", "there is nothing to evaluate on")
    by_epochs = draft.value("train.eval_epochs", 0)
    if draft.has("train.save_best") and not draft.value("train.eval_steps", 0) and not by_epochs:
        draft.put("train.eval_epochs", 1.0)


def _sampling(entry: Entry) -> None:
    if entry.value == "sequential":
        IN_ORDER(entry)
    elif entry.value == "random":
        entry.no_effect("samples are shuffled")
    else:
        entry.approximated("samples are shuffled, and stand beside others of any length")


FROM_FIRST = "evaluations begin with the first one that is due"
RECOMPUTED_ALIKE = rule.when(
    lambda entry: isinstance(entry.value, dict),
    rule.no_effect("either form of recomputation gives the same gradients"),
    rule.refuses("is a mapping, such as {use_reentrant: false}"),
)
OF_BEST = rule.when(
    "load_best_model_at_end",
    rule.decides("train.save_best"),
    "read with load_best_model_at_end alone",
)

IDLE = by_reason(
    f"""
    overwrite_output_dir disable_tqdm log_level log_level_replica logging_first_step
    logging_strategy logging_nan_inf_filter include_num_input_tokens_seen prediction_loss_only
    include_tokens_per_second include_for_metrics batch_eval_metrics remove_unused_columns
    label_names save_safetensors save_on_each_node dataloader_persistent_workers dataloader_in_order
    skip_memory_metrics use_cache debug local_rank ignore_data_skip do_predict ddp_timeout
    ddp_backend ddp_bucket_cap_mb ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph
    eval_do_concat_batches dataloader_multiprocessing_context enable_jit_checkpoint
    length_column_name eval_use_gather_object restore_callback_states_from_checkpoint no_cuda
    trackio_space_id trackio_bucket_id trackio_static_space_id use_cpu bf16_full_eval fp16_full_eval
    hub_strategy hub_always_push project: {OF_PYTHON}
    torch_empty_cache_steps eval_accumulation_steps: memory is freed as it is needed
    use_liger_kernel liger_kernel_config: fused kernels are taken wherever they serve
    torch_compile_backend torch_compile_mode: torch.compile's own is taken
    tf32: products of float32 are exact here
    average_tokens_across_devices: the loss is a mean over all tokens of a step, on all ranks
    fsdp_config: every decoder layer is a unit of FSDP, and checkpoints are whole
    trust_remote_code: model.trust_remote_code runs code of a commit, in a native file
    group_by_length: sequences are padded to a multiple of 128 tokens in any case
    do_train: a run trains; train.eval_only evaluates alone
    do_eval: eval_strategy says when
    """
)

UNSUPPORTED = by_reason(
    """
    neftune_noise_alpha: no noise is added to embeddings
    optim_args: write train.optimizer_kwargs in a native file
    optim_target_modules: optimizers that project gradients are not here
    accelerator_config parallelism_config: write settings of train in a native file
    hub_token: a secret belongs in the environment: set HF_TOKEN
    """
)

SAME: Mapping[str, str] = {
    **same_names(
        "train.", "output_dir gradient_accumulation_steps max_grad_norm seed save_total_limit"
    ),
    **same_names(
        "data.",
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor"
        " dataloader_drop_last",
    ),
    "per_device_train_batch_size": "train.micro_batch_size",
    "per_device_eval_batch_size": "train.eval_micro_batch_size",
    "learning_rate": "train.lr",
    "label_smoothing_factor": "train.label_smoothing",
    "eval_on_start": "train.eval_at_start",
    "gradient_checkpointing": "train.enable_gradient_checkpointing",
    "activation_checkpointing": "train.enable_gradient_checkpointing",
    "torch_compile": "train.enable_compile",
    "run_name": "train.wandb_name",
    "hub_private_repo": "push.private",
    "hub_revision": "push.revision",
}

COMPUTED: Mapping[str, Rule] = {
    "num_train_epochs": rule.when(
        has_steps,
        rule.no_effect("max_steps is written, and ends the run"),
        rule.put("train.num_train_epochs"),
    ),
    "max_steps": rule.unless_minus_one("train.max_steps", "-1: epochs end the run"),
    "weight_decay": _decay,
    "optim": schedule.optimizer,
    **{name: schedule.of_adam("optim") for name in (*schedule.BETAS, "adam_epsilon")},
    "lr_scheduler_type": schedule.schedule,
    "lr_scheduler_kwargs": schedule.schedule_arguments("lr_scheduler_type", "learning_rate"),
    "warmup_steps": schedule.warmup_steps,
    "warmup_ratio": schedule.warmup_ratio,
    "bf16": _in_bits,
    "fp16": _in_bits,
    "logging_steps": _log_steps,
    "log_on_each_node": rule.choice("train.log_ranks", {True: "local0", False: "global0"}),
    "eval_strategy": _evaluations,
    "evaluation_strategy": _evaluations,
    "eval_steps": rule.when(
        lambda entry: (entry.get("eval_strategy") or entry.get("evaluation_strategy")) == "steps",
        rule.decides("train.eval_steps", "train.eval_epochs"),
        "read with eval_strategy: steps alone",
    ),
    "save_strategy": savings,
    "save_steps": rule.when(
        lambda entry: entry.get("save_strategy", "steps") == "steps",
        rule.decides("train.save_steps", "train.save_epochs"),
        "read with save_strategy: steps alone",
    ),
    "save_only_model": rule.negated("train.save_optimizer"),
    "load_best_model_at_end": _best,
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), OF_BEST),
    "report_to": reports,
    "logging_dir": events_folder,
    "resume_from_checkpoint": _resuming,
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"), RECOMPUTED_ALIKE
    ),
    "train_sampling_strategy": _sampling,
    # `fit_parallel_sizes` sets it, where the number of replicas is known.
    "auto_find_batch_size": rule.if_on(rule.decides("train.micro_batch_size"), "is off"),
    "data_seed": rule.when(
        lambda entry: entry.value != entry.get("seed", 42),
        rule.approximated("train.seed decides the order of samples too"),
        "seed is the same",
    ),
    "eval_delay": rule.if_on(rule.approximated(FROM_FIRST), FROM_FIRST),
    "push_to_hub": _pushing,
    "hub_model_id": rule.when(
        "push_to_hub", rule.put("push.repo_id"), "read with push_to_hub alone"
    ),
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    "full_determinism": determinism,
}

# The keys of the trainer, over which tools that are built on it write their own.
TRAINER = Table(same=SAME, computed=COMPUTED, unsupported=UNSUPPORTED, idle=IDLE)

# Those of transformers; tools with other ones of their own write them over these.
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_drop_last": False,
    "save_strategy": "steps",
    "logging_steps": 500,
}
