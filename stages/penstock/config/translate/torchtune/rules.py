"""torchtune: files that name Python components, `_component_: torchtune.…`."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.config.translate import rule, shared
from penstock.config.translate.dialect import Dialect, Values, by_reason, listed, same_names, typed
from penstock.config.translate.hf import schedule
from penstock.config.translate.hf.training_arguments import settle_evaluations
from penstock.config.translate.interpolation import resolve_references
from penstock.config.translate.shared import SOURCES, lay_rows, settle_precision
from penstock.config.translate.torchtune.data import sources
from penstock.config.translate.translation import Draft, Entry, Rule
from penstock.core.errors import ConfigError

COMPONENT = "_component_"
MODEL, LOSS, OPTIMIZER = (f"{name}.{COMPONENT}" for name in ("model", "loss", "optimizer"))

# Prefixes of builders of models with adapters.
ADAPTED = ("lora_", "qlora_", "dora_", "qdora_")

MLP = ["gate_proj", "up_proj", "down_proj"]

FUSED_MODELS = ("phi3", "phi4")
# Layers of torchtune that are rows of one layer in the checkpoints of these models.
FUSED_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}

CROSS_ENTROPY = "CrossEntropyLoss"
PREFERENCE_LOSSES = {"DPOLoss": "sigmoid", "RSOLoss": "hinge", "SimPOLoss": "simpo"}

OPTIMIZERS: Mapping[str, str] = {
    "AdamW": "adamw",
    "AdamWFp8": "adamw",
    "CPUOffloadOptimizer": "adamw",
    "PagedAdamW": "adamw",
    "AdamW8bit": "adamw",
    "PagedAdamW8bit": "adamw",
    "SGD": "sgd",
    "Adam": "torch.optim.Adam",
    "Adagrad": "torch.optim.Adagrad",
}
TRACKERS = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}
PARTS = {
    "model.encoder_trainable": "vision",
    "model.fusion_trainable": "projector",
    "model.decoder_trainable": "language",
}


def _recognizes(values: Values) -> bool:
    sections = [cast("dict[str, Any]", v) for v in values.values() if isinstance(v, dict)]
    return any(str(section.get(COMPONENT)).startswith("torchtune.") for section in sections)


def _prepare(values: Values) -> Values:
    try:
        return resolve_references(values)
    except ConfigError:
        # References that cannot be resolved stay as they are: few keys have them.
        return values


def _last(component: Any) -> str:
    return str(component).rpartition(".")[2]


def _is_adapted(entry: Entry) -> bool:
    return _last(entry.get(MODEL, "")).startswith(ADAPTED)


def _model(entry: Entry) -> None:
    name = _last(entry.value)
    entry.put("lora.enable_lora", name.startswith(ADAPTED))
    if name.startswith(("qlora_", "qdora_")):
        shared.quantizes("nf4")(entry)
    elif name.startswith("q"):
        entry.put("lora.enable_qlora", False)
    if name.startswith(("dora_", "qdora_")):
        entry.put("lora.use_dora", True)
    entry.explain("config.json in checkpointer.checkpoint_dir says the architecture")


def _of_adapters(apply: Rule) -> Rule:
    return rule.when(_is_adapted, apply, "read with adapters alone")


def _of_pairs(name: str) -> Rule:
    return rule.when(
        lambda entry: _last(entry.get(LOSS, "")) in PREFERENCE_LOSSES,
        rule.put(name),
        "this loss does not read it",
    )


def _targets(entry: Entry) -> None:
    attention: list[str] = entry.get("model.lora_attn_modules", [])
    names = ["o_proj" if name == "output_proj" else name for name in attention]
    names += MLP if entry.get("model.apply_lora_to_mlp") else []
    names += ["lm_head"] if entry.get("model.apply_lora_to_output") else []
    if any(f".{model}." in str(entry.get(MODEL)) for model in FUSED_MODELS):
        fused = list(dict.fromkeys(FUSED_LAYERS.get(name, name) for name in names))
        entry.put("lora.lora_target_modules", fused)
        entry.approximated("checkpoints of this model have one layer for q, k and v")
    else:
        entry.put("lora.lora_target_modules", names)


def _trainable(entry: Entry) -> None:
    if _is_adapted(entry):
        entry.approximated("adapters are on the layers of lora_attn_modules, in all parts")
        return
    frozen = [part for key, part in PARTS.items() if entry.get(key, False) in (False, "frozen")]
    entry.put("model.freeze", frozen)


def _loss(entry: Entry) -> None:
    name = _last(entry.value)
    if name in PREFERENCE_LOSSES:
        entry.put("train.objective", "preference")
        entry.put("preference.loss_type", PREFERENCE_LOSSES[name])
    elif CROSS_ENTROPY in name or name.startswith("CEWith"):
        entry.no_effect("the loss is cross-entropy, computed in chunks")
    else:
        entry.refuse(
            f"it takes cross-entropy, {', '.join(PREFERENCE_LOSSES)}; losses of rewards are"
            " for clients of penstock serve"
        )


def _optimizer(entry: Entry) -> None:
    name = _last(entry.value)
    if name not in OPTIMIZERS:
        entry.leave_out(f"it takes {', '.join(OPTIMIZERS)}")
        return
    entry.put("train.optimizer", OPTIMIZERS[name])
    if name.startswith("Paged") or name.endswith("8bit") or name == "AdamWFp8":
        entry.approximated("states are in float32, on the devices")


# Keys of `compile` as a mapping.
COMPILED = frozenset({"model", "loss", "optimizer_step", "scale_grads"})


def _compile(entry: Entry) -> None:
    if not isinstance(entry.value, bool) and not {*dict(entry.value)} <= COMPILED:
        raise ValueError(f"it takes true, false and a mapping of {', '.join(sorted(COMPILED))}")
    entry.put("train.enable_compile", bool(entry.value))
    if isinstance(entry.value, dict):
        entry.approximated("the whole model is compiled")


def _steps(entry: Entry) -> None:
    # Steps of an epoch, at most.
    if entry.value is None or entry.value == -1:
        entry.no_effect("epochs are whole")
    else:
        entry.put("train.max_steps", entry.value * entry.get("epochs", 1))
        entry.explain("of all epochs")


def _finalize(draft: Draft) -> None:
    pairs = draft.value("train.objective") == "preference"
    items = listed(draft.get("dataset") or draft.get("datasets") or [])
    sources = [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]
    packs = any(source.get("packed") for source in sources)
    lay_rows(draft, draft.get("tokenizer.max_seq_len"), "multipack" if packs else None, pairs=pairs)
    # Without lr_scheduler its recipes step none, so the rate stays as it is.
    if not draft.has("train.lr_decay_style"):
        draft.put("train.lr_decay_style", "constant")
        draft.put("train.lr_warmup_ratio", 0.0)
    # Its recipes build and load the model with `dtype` as torch's default: weights are kept in it.
    settle_precision(draft, draft.get("dtype"))
    settle_evaluations(draft)


RESUMED = "checkpoints are in output_dir, and the same command resumes from the newest"
OF_FILES = "the model's files say it"
OF_LAYERS = "every layer computes every token, and the last one gives the loss"

IDLE = by_reason(
    f"""
    device log_level log_peak_memory_stats name custom_sharded_layers memory_efficient_fsdp_wrap
    low_cpu_ram use_distributed_state_dict use_flex dist_backend debug_logging_enabled
    debug_num_samples_per_step optimizer.fused tensor_parallel_plan collate_fn dataloader.collate_fn
    num_output_chunks dataloader.parallel_method dataloader.shuffle dataloader.packed
    metric_logger.log_dir metric_logger.filename ac_mode ac_option loss.num_output_chunks
    loss.ignore_index enable_fp8_training_recipe: {shared.OF_PYTHON}
    checkpointer._component_ checkpointer.checkpoint_files checkpointer.model_type
    checkpointer.checkpoint_files.filename_format checkpointer.checkpoint_files.max_filename
    base_model_path: {OF_FILES}
    checkpointer.output_dir checkpointer.recipe_checkpoint: {RESUMED}
    checkpointer.safe_serialization: weights are always written as safetensors
    """
)

FAMILIES: Mapping[str, Rule | str] = {
    **by_reason(
        f"""
        ref_checkpointer.
        ref_policy_checkpointer.: the reference is the model that training starts from
        tokenizer. model.image_size model.max_seq_len model.vocab_size model.num_
        model.embed_dim model.norm_eps: {OF_FILES}
        policy_model. reward_ value_checkpointer. ppo_ grpo_ num_steps forward_batch_size
        penalise_no_eos stop_token_ids min_response_length whiten_rewards kl_coeff gamma lmbda
        loss.epsilon loss.kl_coeff loss.value_ inference. postprocessing. training.
        orchestration.: read by training with rewards alone
        teacher_ kd_ratio: read with kd_loss, which is refused
        max_generated_tokens max_new_tokens temperature top_k prompt enable_kv_cache
        apply_chat_template: read by generation alone
        profiler.: read with profiler.enabled alone; train.profile_start_step says when
        fsdp.: {shared.OF_PYTHON}
        """
    ),
    **dict.fromkeys(("layer_dropout.", "early_exit_loss."), rule.unsupported(OF_LAYERS)),
}

SAME: Mapping[str, str] = {
    **same_names("train.", "output_dir gradient_accumulation_steps seed"),
    "checkpointer.checkpoint_dir": "model.model_path",
    "checkpointer.adapter_checkpoint": "lora.init_adapter_path",
    "epochs": "train.num_train_epochs",
    "batch_size": "train.micro_batch_size",
    "batch_size_val": "train.eval_micro_batch_size",
    "shuffle": "data.shuffle_merged_datasets",
    "optimizer.lr": "train.lr",
    "optimizer.weight_decay": "train.weight_decay",
    "optimizer.betas": "train.optimizer_kwargs.betas",
    "optimizer.eps": "train.optimizer_kwargs.eps",
    "optimizer_in_bwd": "train.fuse_optimizer_step",
    "lr_scheduler.num_warmup_steps": "train.lr_warmup_steps",
    "run_val_every_n_steps": "train.eval_steps",
    "log_every_n_steps": "train.log_interval",
    "enable_activation_checkpointing": "train.enable_gradient_checkpointing",
    "enable_activation_offloading": "train.enable_activation_offload",
    "tensor_parallel_dim": "train.tensor_parallel_size",
    "context_parallel_dim": "train.ringattn_parallel_size",
    "data_parallel_replicate_dim": "train.data_parallel_replicate_size",
    "data_parallel_shard_dim": "train.data_parallel_shard_size",
    "dataloader.num_workers": "data.dataloader_num_workers",
    "dataloader.pin_memory": "data.dataloader_pin_memory",
    "dataloader.prefetch_factor": "data.dataloader_prefetch_factor",
    "metric_logger.project": "train.wandb_project",
    "metric_logger.name": "train.wandb_name",
    "enable_async_checkpointing": "train.save_async",
    "keep_last_n_checkpoints": "train.save_total_limit",
    "checkpointer.keep_last_n_checkpoints": "train.save_total_limit",
    "enable_fp8_training": "train.enable_fp8_training",
}

COMPUTED: Mapping[str, Rule] = {
    **dict.fromkeys(("dataset", "datasets"), sources),
    "dataset_val": rule.when(
        "run_val_every_n_steps",
        sources,
        "run_val_every_n_steps is null, so there are no evaluations",
    ),
    "tokenizer.max_seq_len": rule.decides(shared.ROW, f"{SOURCES}.0.max_seq_len"),
    MODEL: _model,
    **{
        f"model.{name}": _of_adapters(rule.put(f"lora.{name}"))
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "use_dora")
    },
    **dict.fromkeys(
        ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output"),
        _of_adapters(_targets),
    ),
    "model.attn_dropout": rule.unsupported("attention has no dropout"),
    "model.quantize_base": rule.when(
        lambda entry: entry.value and _is_adapted(entry),
        shared.quantizes("nf4"),
        "base weights keep their precision",
    ),
    **dict.fromkeys(PARTS, _trainable),
    LOSS: _loss,
    "loss.beta": _of_pairs("preference.beta"),
    "loss.label_smoothing": _of_pairs("preference.label_smoothing"),
    "loss.gamma": _of_pairs("preference.simpo_gamma"),
    OPTIMIZER: _optimizer,
    f"lr_scheduler.{COMPONENT}": rule.when(
        lambda entry: _last(entry.value) == "get_cosine_schedule_with_warmup",
        rule.sets({"train.lr_decay_style": "cosine", "train.lr_min": 0.0}),
        rule.left_out("it takes get_cosine_schedule_with_warmup"),
    ),
    "lr_scheduler.num_cycles": rule.when(
        lambda entry: entry.value != 0.5,
        rule.put(f"{schedule.MORE}.num_cycles"),
        "the rate falls once",
    ),
    "dtype": rule.choice(
        "train.precision", {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp32": "fp32"}
    ),
    "compile": _compile,
    "max_steps_per_epoch": _steps,
    "clip_grad_norm": rule.put("train.max_grad_norm", lambda norm: norm or 0.0),
    **dict.fromkeys(
        ("fsdp_cpu_offload", "fsdp.cpu_offload"), rule.truth("train.enable_fsdp_offload")
    ),
    f"metric_logger.{COMPONENT}": rule.when(
        lambda entry: _last(entry.value) in TRACKERS,
        lambda entry: shared.track(entry, TRACKERS[_last(entry.value)]),
        "metrics.jsonl and report.html are always written",
    ),
    "profiler.enabled": rule.put("train.enable_profiling", bool),
    "resume_from_checkpoint": shared.RESUMES,
    "save_every_n_epochs": rule.put("train.save_epochs", float),
    "save_adapter_weights_only": rule.truth("lora.save_lora_only"),
    "kd_loss": rule.refused("models are not trained on log-probs of others"),
    "quantizer": rule.unsupported(
        "weights are trained as they are; export.quantise quantizes the result"
    ),
}

# Files with a component of torchtune.
TORCHTUNE = Dialect(
    name="torchtune",
    title="torchtune",
    recognizes=_recognizes,
    same=SAME,
    computed=COMPUTED,
    types=typed(
        switch="model.apply_lora_to_mlp model.apply_lora_to_output resume_from_checkpoint"
        " save_adapter_weights_only profiler.enabled fsdp.cpu_offload fsdp_cpu_offload"
        " model.quantize_base dataset.packed",
        number="tokenizer.max_seq_len",
        text="model._component_",
    ),
    idle=IDLE,
    families=FAMILIES,
    defaults={
        "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999],
        "batch_size": 1,
        "epochs": 1,
        "save_every_n_epochs": 1,
        "clip_grad_norm": 0.0,
        "model.lora_rank": 8,
        "model.lora_alpha": 16,
        "model.lora_dropout": 0.0,
    },
    meaningful_nulls=frozenset({"clip_grad_norm"}),
    prepare=_prepare,
    finalize=_finalize,
)
