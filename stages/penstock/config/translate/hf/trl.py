"""TRL: the flat files of `trl sft --config` and `trl dpo --config`."""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule, shared
from penstock.config.translate.dialect import Dialect, Values, by_reason, is_flat, same_names, typed
from penstock.config.translate.hf import schedule, training_arguments
from penstock.config.translate.hf.trl_data import columns_of, data_rules
from penstock.config.translate.shared import SOURCES
from penstock.config.translate.templates import chat_template
from penstock.config.translate.translation import Draft, Entry, Rule

# Keys that `trl dpo` alone has.
OF_PAIRS = (
    *("beta", "loss_weights", "label_smoothing", "precompute_ref_log_probs", "max_prompt_length"),
    *("sync_ref_model", "f_divergence_type", "use_weighting", "rpo_alpha", "reference_free"),
    *("precompute_ref_batch_size", "max_completion_length", "disable_dropout"),
    *("desirable_weight", "undesirable_weight"),
)

# Keys, and prefixes of keys, that `trl grpo` has, which generates while it trains.
OF_REWARDS = (
    *("num_generations", "scale_rewards", "num_iterations", "steps_per_generation", "delta"),
    *("generation_batch_size", "epsilon", "epsilon_high", "importance_sampling_level"),
    *("mask_truncated_completions", "log_completions", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "use_vllm", "generation_kwargs", "cache_implementation"),
    *("multi_objective_aggregation", "max_tool_calling_iterations", "num_completions_to_print"),
    *("off_policy_mask_threshold", "top_entropy_quantile", "use_adaptive_entropy"),
    *("use_bias_correction_kl", "cast_lm_head_to_fp32", "log_multimodal", "log_unique_prompts"),
    *("ds3_gather_for_generation", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    "transformers_continuous_batching_config",
)
FAMILIES_OF_REWARDS = (
    *("vllm_", "reward_", "entropy_", "sapo_", "vespo_", "use_transformers_", "num_generations_"),
    "log_completions_",
)

# Keys by which other flat files are recognized.
OF_OTHERS = (
    *("stage", "finetuning_type", "template", "base_model", "train_dataset_path", "fine_tuning"),
    *("tensor_parallel_degree", "compute_type", "sharding", "train_dataset_type"),
)

ON = "use_peft"

# Keys that name data, besides a list of `datasets`.
DATA = ("dataset_name", "dataset_mixture", "dataset_mixer")

# Keys of which a file has at least three whose program names the data.
ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("learning_rate", "max_seq_length", "max_length", "use_peft", "lr_scheduler_type", "bf16"),
    *("eval_strategy", "evaluation_strategy", "save_strategy", "report_to", "torch_dtype"),
)


def _is_trl(values: Values) -> bool:
    names_data = isinstance(values.get("datasets"), list) or any(name in values for name in DATA)
    foreign = any(name in values for name in OF_OTHERS)
    is_of_trainer = sum(name in values for name in ARGUMENTS) >= 3
    has_model = is_flat(values) and "model_name_or_path" in values
    return has_model and (names_data or is_of_trainer) and not foreign


def _is_of_pairs(values: Values) -> bool:
    losses = shared.names_in(values.get("loss_type") or [])
    if any(name in values for name in OF_REWARDS):
        return False
    return any(name in values for name in OF_PAIRS) or any(name in shared.LOSSES for name in losses)


def _dtype(entry: Entry) -> None:
    entry.decides("train.precision")
    if entry.value == "auto":
        entry.approximated("bfloat16 is taken for what the checkpoint is stored in")


def _data_arguments(entry: Entry) -> None:
    arguments: dict[str, Any] = entry.value
    off = ("add_special_tokens", "append_concat_token")
    unread = [name for name, value in arguments.items() if value or name not in off]
    if unread := [name for name in unread if name != "skip_prepare_dataset"]:
        entry.leave_out(
            f"{', '.join(unread)}: samples are prepared in the one way that the data's type says"
        )
    else:
        entry.no_effect("the chat template says which special tokens there are")


def _packing_strategy(entry: Entry) -> None:
    if not entry.get("packing"):
        entry.no_effect("packing is false")
        return
    entry.decides(shared.METHOD, "data.isolate_samples")
    if entry.value == "wrapped":
        entry.explain("samples are one stream, split where a packed sequence is full")


def _checkpointing(entry: Entry) -> None:
    # A boolean, text such as "True", or "unsloth", which recomputes too.
    if not (isinstance(entry.value, bool) or str(entry.value).lower() in SWITCHES):
        raise ValueError(f"it takes true, false or unsloth, not {entry.value}")
    entry.put("train.enable_gradient_checkpointing", rule.is_on(entry.value))


def _finalize(draft: Draft) -> None:
    pairs = draft.value("train.objective") == "preference"
    is_wrapped = draft.get("packing_strategy") == "wrapped" and not pairs
    packing = ("wrapped" if is_wrapped else "multipack") if draft.get("packing") else None
    # Unsloth's max_seq_length is of the model, where a trainer's max_length is written.
    longest = (
        draft.written.get("max_length") or draft.get("max_seq_length") or draft.get("max_length")
    )
    shared.lay_rows(draft, longest, packing, pairs=pairs)
    weights = draft.get("torch_dtype") or draft.get("dtype")
    shared.settle_precision(draft, "bfloat16" if weights == "auto" else weights)
    schedule.require_decay_steps(draft, "lr_scheduler_type")
    training_arguments.settle_evaluations(draft)


def _objective(draft: Draft) -> None:
    draft.put("train.objective", "preference")
    _finalize(draft)


IDLE = by_reason(
    f"""
    padding_free: rows have no padding between samples
    ignore_bias_buffers: there are no such buffers
    use_bnb_nested_quant: scales are kept as they are, a little larger
    bnb_4bit_quant_storage: how bits lie in memory, which changes no result
    lora_task_type: language models are all that is trained
    shuffle_dataset: samples are shuffled in any case, there by the trainer
    pad_token: padding is never trained, whatever token it is
    disable_dropout: nothing is dropped unless train.dropout says so
    precompute_ref_batch_size: micro_batch_size is taken
    dataset_test_split: read where evaluations are asked for
    dataset_streaming: sources are always read in parts
    full_finetuning: use_peft says it
    random_state: train.seed decides where adapters start
    device_map offload_embedding unsloth_force_compile auto_model token fast_inference
    gpu_memory_utilization max_lora_rank load_in_16bit unsloth_tiled_mlp float8_kv_cache
    device_map_planner_kwargs use_exact_model_name max_memory: {shared.OF_PYTHON}
    """
)

IDLE_OF_PAIRS = by_reason(
    """
    f_alpha_divergence_coef: read of other divergences alone
    discopop_tau: read of the loss discopop alone
    ref_model_mixup_alpha ref_model_sync_steps: read with sync_ref_model alone
    """
)

BY_REWARDS = "models are not trained by rewards: clients of penstock serve generate and train"
SWITCHES = ("true", "false", "unsloth")

UNSUPPORTED = by_reason(
    f"""
    eos_token: put it into the tokenizer, and name that as model.tokenizer_path
    model_init_kwargs: write what it says as settings of model in a native file
    lora_modules_to_save: whole layers beside adapters are not trained
    lora_target_parameters layers_to_transform layers_pattern: name layers in lora_target_modules
    modules_to_save: {shared.BESIDE_ADAPTERS}
    loftq_config init_lora_weights: adapters start at zero
    embedding_learning_rate: one rate for all weights
    load_in_fp8: load_in_4bit and load_in_8bit quantize base weights
    qat_scheme: weights are trained as they are; export.quantise quantizes the result
    num_labels id2label label2id
    task_type: models are trained to continue text, and not to choose among labels
    sync_ref_model: the reference stays what it was at the start
    use_weighting: all pairs weigh the same
    ld_alpha: all tokens of an answer count the same
    max_completion_length: write max_length, of which the prompt is a part
    """
)

SAME: Mapping[str, str] = {
    **same_names("data.", "dataset_num_proc truncation_mode"),
    "model_name_or_path": "model.model_path",
    "tokenizer_name_or_path": "model.tokenizer_path",
    "preprocessing_num_workers": "data.dataset_num_proc",
    "hub_model_revision": "push.revision",
    "eval_packing": "data.eval_sample_packing",
    "lora_bias": "lora.lora_bias",
    "router_aux_loss_coef": "train.moe_aux_loss_coef",
    "activation_offloading": "train.enable_activation_offload",
}

COMPUTED: Mapping[str, Rule] = {
    "dataset_config": rule.decides(f"{SOURCES}.0.name"),
    "dataset_train_split": rule.decides(f"{SOURCES}.0.split"),
    "dtype": _dtype,
    "torch_dtype": _dtype,
    "attn_implementation": shared.attention,
    "model_revision": rule.only("main"),
    **dict.fromkeys(
        ("max_length", "max_seq_length"), rule.decides(shared.ROW, f"{SOURCES}.0.max_seq_len")
    ),
    **dict.fromkeys(("chat_template", "chat_template_path"), chat_template({})),
    "pad_to_multiple_of": rule.when(
        lambda entry: isinstance(entry.value, int),
        rule.put("data.pad_to_multiple_of"),
        "rows are padded to whole 128 tokens",
    ),
    "dataset_kwargs": _data_arguments,
    **dict.fromkeys(("use_flash_attention_2", "use_unsloth"), rule.no_effect(shared.BEST_HERE)),
    ON: rule.truth("lora.enable_lora"),
    **shared.of_adapters(
        ON,
        True,
        lora_r="lora_rank",
        lora_alpha="lora_alpha",
        lora_dropout="lora_dropout",
        use_rslora="use_rslora",
        use_dora="use_dora",
    ),
    "lora_target_modules": rule.when(ON, shared.put_targets, f"read with {ON}: true alone"),
    "use_gradient_checkpointing": _checkpointing,
    **dict.fromkeys(
        ("finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules"),
        rule.if_on(
            rule.no_effect("adapters are on the layers of lora_target_modules"),
            rule.left_out("name the other layers in lora_target_modules"),
        ),
    ),
    **dict.fromkeys(
        ("finetune_vision_layers", "finetune_audio_layers"),
        rule.if_on(
            rule.approximated("adapters are on the layers of lora_target_modules, in all parts"),
            "lora.exclude_modules leaves layers out, in a native file",
        ),
    ),
    "load_in_4bit": shared.in_few_bits("nf4"),
    "load_in_8bit": shared.in_few_bits("int8"),
    "bnb_4bit_quant_type": rule.only("nf4"),
}

# Those of version 1; targets of adapters are peft's for Llama and Qwen.
DEFAULTS: Mapping[str, Any] = {
    **training_arguments.DEFAULTS,
    "output_dir": "trainer_output",
    "logging_steps": 10,
    "bf16": True,
    "gradient_checkpointing": True,
    "dtype": "float32",
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
}

BEATEN = {"dtype": ("torch_dtype",), "max_length": ("max_seq_length",)}

TYPES = typed(
    switch="bf16 fp16 push_to_hub use_peft load_in_4bit load_in_8bit packing assistant_only_loss"
    " finetune_vision_layers finetune_audio_layers",
    number="eval_steps save_steps max_length max_seq_length dataset_mixture.seed",
    text="torch_dtype dtype chat_template dataset_name dataset_text_field packing_strategy",
)

# `trl sft`.
TRL = Dialect(
    name="trl",
    title="TRL",
    recognizes=_is_trl,
    types=TYPES,
    same=SAME,
    computed={
        **{
            key: rule.refused(BY_REWARDS)
            for key in (*OF_REWARDS, *OF_PAIRS)
            if key not in UNSUPPORTED and key not in IDLE
        },
        **COMPUTED,
        **data_rules("sft"),
        "dataset_text_field": rule.decides(f"{SOURCES}.0.field_text"),
        "packing": rule.decides(shared.METHOD, shared.GROUP),
        "packing_strategy": _packing_strategy,
        "assistant_only_loss": rule.when(
            lambda entry: columns_of(entry, "sft")["type"] == "chat",
            rule.put("data.train_on_prompt", lambda alone: not alone),
            "read of conversations alone",
        ),
        "completion_only_loss": rule.if_on(
            rule.decides(SOURCES), rule.sets({"data.train_on_prompt": True})
        ),
        "loss_type": rule.when(
            lambda entry: any(key in entry.draft.written for key in OF_REWARDS),
            rule.refuses(BY_REWARDS),
            rule.only("nll", "chunked_nll"),
        ),
    },
    unsupported=UNSUPPORTED,
    idle=IDLE,
    defaults={**DEFAULTS, "learning_rate": 2e-5, "assistant_only_loss": False},
    families=dict.fromkeys(FAMILIES_OF_REWARDS, rule.refused(BY_REWARDS)),
    overridden_by={**BEATEN, "assistant_only_loss": ("completion_only_loss",)},
    finalize=_finalize,
).over(training_arguments.TRAINER)

# `trl dpo`: a file with keys that it alone has.
TRL_DPO = Dialect(
    name="trl-dpo",
    title="TRL's DPO",
    recognizes=lambda values: _is_trl(values) and _is_of_pairs(values),
    types=TYPES,
    same={
        **SAME,
        **same_names("preference.", "beta label_smoothing reference_free"),
        "rpo_alpha": "preference.sft_loss_ratio",
        "max_prompt_length": "data.max_prompt_len",
    },
    computed={
        **COMPUTED,
        **data_rules("preference"),
        "loss_type": shared.losses,
        "loss_weights": rule.decides("preference.pref_loss_ratio", "preference.sft_loss_ratio"),
        "precompute_ref_log_probs": shared.PRECOMPUTES,
        **dict.fromkeys(
            ("desirable_weight", "undesirable_weight"),
            rule.refused("of trl kto; write preference.loss_type: kto, and type: kto of its data"),
        ),
        "f_divergence_type": rule.only("reverse_kl"),
    },
    unsupported=UNSUPPORTED,
    idle={**IDLE, **IDLE_OF_PAIRS},
    defaults={**DEFAULTS, "learning_rate": 1e-6, "loss_type": ["sigmoid"], "beta": 0.1},
    overridden_by=BEATEN,
    finalize=_objective,
).over(training_arguments.TRAINER)
