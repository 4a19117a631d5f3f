"""ERNIEKit: flat files, of which two vocabularies are in use.

Its documentation has one (`lora`, `bf16`, `per_device_train_batch_size`); its program reads
another (`fine_tuning`, `compute_type`, `batch_size`) and overwrites the first from it. A key of the
program stands before one of the documentation, and that before the documented default.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.dialect import Dialect, Values, by_reason, is_flat, same_names, typed
from penstock.config.translate.erniekit.checkpoint import SAVING
from penstock.config.translate.erniekit.data import DATA, IMAGES, data_is_there
from penstock.config.translate.erniekit.objective import OBJECTIVE, adapters_are_whole, infer_stage
from penstock.config.translate.erniekit.training import LAYOUT, TRAINING
from penstock.config.translate.shared import track
from penstock.config.translate.translation import Draft, Entry, Rule

# Keys of which its files have at least two.
SIGNATURE = (
    *("model_name_or_path", "train_dataset_path", "fine_tuning", "stage"),
    *("tensor_parallel_degree", "per_device_train_batch_size"),
)


def _recognizes(values: Values) -> bool:
    return is_flat(values) and sum(name in values for name in SIGNATURE) >= 2


SAME: Mapping[str, str] = {
    **same_names("train.", "output_dir seed num_train_epochs layerwise_lr_decay_bound"),
    "logging_steps": "train.log_interval",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "learning_rate": "train.lr",
    "dataloader_num_workers": "data.dataloader_num_workers",
    "tensor_parallel_output": "train.tp_vocab_parallel_loss",
    "recompute": "train.enable_gradient_checkpointing",
    "recompute_use_reentrant": "train.enable_reentrant",
    "moe_aux_loss_lambda": "train.moe_aux_loss_coef",
}

# Keys that change nothing here.
IDLE = by_reason(
    """
    release_grads: gradients are always released after the step
    fuse_linear: bias and product are always one operation
    optim_shard_num: every rank saves its own part, tensor by tensor
    sharding_parallel_config
    sharding_comm_buffer_size_MB: a way to overlap or lay out communication, which changes no result
    use_sp_callback: another place for the same sum of gradients
    use_attn_mask_start_row_indices
    use_attn_mask_startend_row_indices: documents of a row are kept apart by their lengths
    use_sparse_flash_attn
    use_flash_attn_with_mask: what is masked is skipped wherever the attention kernel can
    load_sharded_model: weights are always read in parts
    save_sharded_model: every rank saves its own part of weights and states
    use_sparse_head_and_loss_fn: tokens that are not trained never reach the head
    """
)

PADDLE, PUBLISHED = "-Paddle", "-PT"


def _model(entry: Entry) -> None:
    name = source = str(entry.value).rstrip("/")
    if name.startswith("baidu/") and name.endswith(PADDLE):
        source = name.removesuffix(PADDLE) + PUBLISHED
    kind = "model" if entry.get("continue_training", True) else "config"
    entry.put(f"model.{kind}_path", source)
    if source != name:
        entry.approximated(f"{PADDLE} weights are in Paddle's layout; {PUBLISHED} has the same")


def _attention(entry: Entry) -> None:
    plain = "eager" if entry.get("attention_probs_dropout_prob") else "sdpa"
    entry.put("model.attn_implementation", None if entry.value else plain)
    if entry.value:
        entry.explain("the best that the machine has, FlashAttention 3 first")


def _log_dir(entry: Entry) -> None:
    track(entry, "tensorboard")
    if entry.line.names:
        entry.put("train.log_dir", entry.value)


RULES: Mapping[str, Rule] = {
    "model_name_or_path": _model,
    "continue_training": rule.in_turn(
        rule.decides("model.model_path", "model.config_path"),
        lambda entry: entry.explain(
            "pre-trained weights" if entry.value else "random weights of the model's configuration"
        ),
    ),
    "download_hub": rule.when(
        lambda entry: entry.value != "huggingface",
        rule.approximated("models are taken from the Hugging Face hub, or from a folder"),
        "models are taken from the Hugging Face hub",
    ),
    "max_shard_size": rule.put("export.max_shard_size", lambda size: f"{size}GB"),
    "hf_hub_id": rule.put("push.repo_id"),
    "use_flash_attention": _attention,
    "fuse_rope": rule.if_true(
        "model.rope_native",
        value=False,
        otherwise="the default; rotations are fused where a kernel serves, to the same result",
    ),
    "fuse_rms_norm": rule.negated("model.rmsnorm_native"),
    "fuse_swiglu": rule.negated("model.activation_native"),
    "disable_tqdm": rule.put(
        "train.log_format", lambda off: "structured" if off else "progress_bar"
    ),
    "logging_dir": _log_dir,
}

# What is documented, and of keys that only the program has, what that does.
DEFAULTS: Mapping[str, Any] = {
    "seed": 42,
    "layerwise_lr_decay_bound": 1.0,
    "lora": False,
    "bf16": False,
    "amp_master_grad": False,
    "scale_loss": 2**15,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "min_lr": 0.0,
    "lr_end": 1e-7,
    "power": 1.0,
    "num_cycles": 0.5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "recompute": False,
    "save_strategy": "no",
    "evaluation_strategy": "steps",
    "max_evaluate_steps": 1,
    "do_train": True,
    "do_eval": False,
    "num_train_epochs": 1,
    "max_steps": -1,
    "max_seq_len": 4096,
    "learning_rate": 5e-5,
    "overwrite_output_dir": False,
    "stage": "SFT",
    "mix_strategy": "random",
    "random_shuffle": True,
    "packing": True,
    "greedy_intokens": True,
    "num_samples_each_epoch": 6_000_000,
    "sequence_parallel": True,
    "max_prompt_len": 2048,
    "mask_out_eos_token": True,
    "lora_rank": 8,
    "lora_alpha": -1,
    "loss_type": "sigmoid",
    "beta": 0.1,
    "simpo_gamma": 0.5,
    "label_smoothing": 0.0,
    "pref_loss_ratio": 1.0,
    "sft_loss_ratio": 0.0,
    "dpop_lambda": 50,
    "normalize_logps": True,
    "apply_hadamard": True,
    "quant_input_grad": False,
    "quant_weight_grad": False,
    "fp8_format_type": "hybrid",
}


def _finalize(draft: Draft) -> None:
    data_is_there(draft)
    adapters_are_whole(draft)


ERNIEKIT = Dialect(
    name="erniekit",
    title="ERNIEKit",
    recognizes=_recognizes,
    same=SAME,
    types=typed(
        switch="packing fuse_rope do_train do_eval disable_tqdm offload_optim unified_checkpoint"
        " bf16 disable_ckpt_quant tensorwise_offload_optimizer fuse_rms_norm one_sample_in_one_seq"
        " overwrite_output_dir amp_master_grad use_flash_attention",
        text="train_dataset_path eval_dataset_path model_name_or_path logging_dir sharding optim",
    ),
    computed={**RULES, **DATA, **SAVING, **LAYOUT, **TRAINING, **OBJECTIVE, **IMAGES},
    unsupported={
        "num_nextn_predict_layers": "layers that predict several tokens are not trained here;"
        " write 0"
    },
    idle=IDLE,
    defaults=DEFAULTS,
    inferred=infer_stage,
    overridden_by={
        "per_device_train_batch_size": ("batch_size",),
        "lora": ("fine_tuning",),
        "bf16": ("compute_type",),
        "weight_quantize_algo": ("compute_type",),
        "overwrite_output_dir": ("resume_from_checkpoint",),
    },
    finalize=_finalize,
)
