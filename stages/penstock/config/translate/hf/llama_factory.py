"""LLaMA-Factory: the flat files of `llamafactory-cli train`."""

from penstock.config.translate import rule, shared
from penstock.config.translate.dialect import Dialect, Values, by_reason, is_flat, same_names, typed
from penstock.config.translate.hf import schedule, training_arguments
from penstock.config.translate.hf.llama_factory_data import BOUNDS, sources
from penstock.config.translate.shared import SOURCES
from penstock.config.translate.templates import LLAMA_FACTORY as LLAMA_FACTORY_TEMPLATES
from penstock.config.translate.templates import chat_template
from penstock.config.translate.translation import Draft, Entry, Rule

# Keys of which its files have at least two.
SIGNATURE = (
    *("finetuning_type", "template", "dataset", "dataset_dir", "cutoff_len", "lora_target"),
    *("flash_attn", "pref_beta", "overwrite_cache", "preprocessing_num_workers"),
)

ON, WITH_LORA = "finetuning_type", ("lora", "oft")
STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "preference", "kto": "preference"}


def _recognizes(values: Values) -> bool:
    has_model = is_flat(values) and "model_name_or_path" in values
    foreign = "fine_tuning" in values or "train_dataset_path" in values
    return has_model and not foreign and sum(name in values for name in SIGNATURE) >= 2


def _stage(entry: Entry) -> None:
    name = str(entry.value)
    if name not in STAGES:
        entry.refuse(f"it takes {', '.join(STAGES)}")
        return
    entry.put("train.objective", STAGES[name])
    if name == "kto":
        entry.put("preference.loss_type", "kto")
        entry.put("preference.kl_pairing", "rotate")
        entry.put("preference.kl_rotation_size", entry.get("preprocessing_batch_size", 1000))


FREEZES = {
    "freeze_vision_tower": "vision",
    "freeze_multi_modal_projector": "projector",
    "freeze_language_model": "language",
}
PROJECTOR_ALONE = "train_mm_proj_only"


def _freeze(entry: Entry) -> None:
    # Unless it is written, it freezes the tower and the projector, and not the language model.
    frozen = [part for key, part in FREEZES.items() if entry.get(key, part != "language")]
    if entry.get(PROJECTOR_ALONE):
        frozen = ["vision", "language"]
    if entry.get(ON) == "lora":
        entry.no_effect("with adapters all of the model's own weights are frozen")
    elif frozen == ["vision", "projector"]:
        entry.no_effect("these parts are frozen unless model.freeze says otherwise")
    else:
        entry.put("model.freeze", frozen)


def _length(entry: Entry) -> None:
    entry.decides(shared.ROW, f"{SOURCES}.0.max_seq_len")
    if entry.get("stage") != "pt":
        entry.approximated(
            "a longer sample loses its end; there prompt and answer are truncated in proportion"
        )


def _packing(entry: Entry) -> None:
    entry.decides(shared.METHOD, shared.GROUP)
    if entry.get("stage") == "pt":
        if entry.value:
            entry.explain("documents are one stream, cut every cutoff_len tokens")
    elif entry.value and not entry.get("neat_packing"):
        entry.approximated("samples do not see those before them in a row, as with neat_packing")


def _beta(entry: Entry) -> None:
    loss = entry.get("pref_loss", "sigmoid")
    if not _prefers(entry.draft):
        entry.no_effect("read with stage: dpo or kto alone")
    elif loss == "orpo" and entry.get("stage") == "dpo":
        # Its ORPO loss is the cross-entropy plus beta times the loss of the odds ratio.
        entry.put("preference.pref_loss_ratio", entry.value)
    else:
        entry.put("preference.beta", entry.value)


def _prefers(draft: Draft) -> bool:
    return draft.get("stage") in ("dpo", "kto")


def _of_dpo(name: str, *losses: str) -> Rule:
    return rule.when(
        lambda entry: entry.get("stage") == "dpo" and entry.get("pref_loss", "sigmoid") in losses,
        rule.put(name),
        "this stage and loss do not read it",
    )


OVER_TOKENS = (
    "cross-entropy is averaged over all tokens of answers; there each answer's own mean counts the"
    " same"
)


def _loss(entry: Entry) -> None:
    if entry.get("stage") != "dpo":
        entry.no_effect("read with stage: dpo alone")
    elif entry.value in shared.LOSSES:
        entry.put("preference.loss_type", entry.value)
        if entry.value == "orpo":
            entry.approximated(OVER_TOKENS)
    else:
        entry.refuse(f"it takes {', '.join(shared.LOSSES)}")


def _finalize(draft: Draft) -> None:
    if draft.get("train_from_scratch"):
        draft.rename("model.model_path", "model.config_path")
    packs, is_pt = draft.get("packing"), draft.get("stage") == "pt"
    if packs is None:
        # Its DataArguments set packing with neat_packing, and its parser with stage pt.
        packs = draft.get("neat_packing") or is_pt
    method = ("wrapped" if is_pt else "multipack") if packs else None
    shared.lay_rows(draft, draft.get("cutoff_len"), method, pairs=_prefers(draft))
    rank, is_written = draft.get("lora_rank"), draft.has("lora.lora_alpha")
    if draft.value("lora.enable_lora") and not is_written and isinstance(rank, int):
        # FinetuningArguments sets `lora_alpha or lora_rank * 2`.
        draft.put("lora.lora_alpha", 2 * rank)
        draft.set_line("lora_alpha", "assumed", "twice lora_rank", "lora.lora_alpha")
    if draft.get("use_muon"):
        draft.put("train.optimizer", "muon")
    _settle_decay(draft)
    _settle_bounds(draft)
    if draft.get("pure_bf16"):
        draft.put("train.precision", "bf16")
    training_arguments.settle_evaluations(draft)


def _settle_bounds(draft: Draft) -> None:
    # Sizes of images and frames of videos are those of data sets with some.
    sources = list(enumerate(draft.sources(SOURCES)))
    for key, field in BOUNDS.items():
        names = [f"{SOURCES}.{index}.{field}" for index, source in sources if field in source]
        if key in draft.written and names:
            why = "the model's processor resizes in its own way"
            draft.set_line(key, "approximated", why, *names)
        elif key in draft.written:
            draft.set_line(key, "no effect", "no data set has a column of them")


def _settle_decay(draft: Draft) -> None:
    # Without a length the decay takes two thirds of the steps after the warmup, rounded up.
    steps, decay = draft.value("train.max_steps"), f"{schedule.MORE}.decay_steps"
    if draft.value("train.lr_decay_style") != "wsd" or draft.has(decay):
        return
    if isinstance(steps, int) and steps > 0:
        # Its create_custom_scheduler keeps the rate for `remaining_steps // 3` steps.
        steps_after_warmup = steps - draft.value("train.lr_warmup_steps", 0)
        draft.put(decay, steps_after_warmup - steps_after_warmup // 3)
        draft.lines["lr_scheduler_type"].names.append(decay)
    schedule.require_decay_steps(draft, "lr_scheduler_type")


IDLE = by_reason(
    """
    overwrite_cache tokenized_path: what is prepared is found again by its content
    plot_loss: report.html has the curves
    neat_packing block_diag_attn: samples of a row never see one another
    enable_liger_kernel use_unsloth use_v1_kernels: fused kernels are taken wherever they serve
    fp8_backend: there is one implementation of FP8 matmuls
    use_distributed_optimizer: states are sharded
    use_unsloth_gc use_reentrant_gc: activations are recomputed in the one way there is
    quantization_method: base weights are quantized as they are read
    double_quantization: scales are kept as they are, a little larger
    low_cpu_mem_usage: weights are read shard by shard
    dataset_dir: dataset and eval_dataset are looked for in it
    buffer_size streaming: sources are always read in parts
    data_shared_file_system: machines meet by what they share
    use_audio_in_video: videos are read without their audio
    audio_sampling_rate: audio has the rate that preprocessor_config.json of the model says
    ref_model_adapters: read by stages that are not here
    ignore_pad_token_for_loss: padding is never trained
    use_fast_tokenizer: the tokenizer is read by transformers, whatever this says
    split_special_tokens: special tokens are whole
    include_num_input_tokens_seen: token counts are always logged
    ray_run_name: torchrun starts the processes
    predict_with_generate: read by do_predict alone
    use_kt: experts compute on GPUs; train.enable_fsdp_offload keeps weights on the host
    cache_dir: HF_HOME in the environment says where downloads are kept
    upcast_layernorm: norms compute in float32
    print_param_status: penstock plan counts parameters
    eval_on_each_dataset: evaluations are of all data together
    compute_accuracy: evaluations log loss and perplexity
    include_effective_tokens_per_second: tokens per second are always logged
    master_addr master_port: launch.rdzv_endpoint says it, in a native file
    compute_dtype: bf16 and fp16 say it
    model_max_length: cutoff_len says it
    fsdp_transformer_layer_cls_to_wrap: every decoder layer is a unit of FSDP
    use_mca use_megatron_bridge use_hyper_parallel: there is one engine
    moe_grouped_gemm moe_token_dispatcher_type recompute_granularity mixed_precision
    use_packed_sequences export_hf_on_finish overlap_param_gather overlap_grad_reduce
    virtual_pipeline_model_parallel_size bias_activation_fusion apply_rope_fusion
    megatron_bridge_args hyper_parallel_args: of another engine; parallel sizes are taken
    """
)

# Prefixes of keys that concern one thing.
FAMILIES = by_reason(
    f"""
    vllm_ sglang_ infer_ do_sample temperature top_p top_k num_beams max_length max_new_tokens
    repetition_penalty length_penalty skip_special_tokens use_kv_cache offload_folder
    eval_num_beams: read by inference alone
    export_: read by exports alone; export and push of a native file say it
    ppo_ reward_model_: read by stages that are refused
    galore_ apollo_ badam_: read with that optimizer alone
    oft_ module_dropout: read with finetuning_type: oft alone
    use_swanlab swanlab_: {shared.NO_TRACKER}
    ray_: torchrun starts the processes
    kt_: read with use_kt alone
    enable_torch_profiler: write train.enable_profiling
    profiler_ profile_modules: read with a profiler alone
    asft_alpha eaft_alpha: read with that loss alone
    """
)

UNSUPPORTED = by_reason(
    f"""
    ref_model ref_model_quantization_bit: the reference is the model that training starts from
    reward_model: models are not trained by rewards
    rope_scaling: write it into the model's config.json, or model.foundation in a native file
    shift_attn: documents are attended to whole
    mixture_of_depths: every layer computes every token
    use_galore use_apollo: optimizers that project gradients are not here
    use_badam: all layers are trained in every step
    pissa_init pissa_iter
    pissa_convert: adapters start at zero; write adapter_name_or_path to start from another
    additional_target: whole layers beside adapters are not trained
    resize_vocab add_tokens add_special_tokens new_special_tokens_config
    init_special_tokens: the vocabulary is that of the checkpoint
    create_new_adapter: one adapter is trained
    efficient_eos: the tokenizer's own template says what ends an answer
    tool_format: the tokenizer's own template says how tools are written
    use_llama_pro: layers are not added
    freeze_trainable_layers freeze_trainable_modules
    freeze_extra_modules: adapters, or all weights, are trained
    use_dft_loss use_eaft_loss use_asft_loss: the loss is cross-entropy
    use_adam_mini: write another optim
    loraplus_lr_embedding: embeddings beside adapters are not trained
    pref_bco_weight: the loss is that of pref_loss alone
    ld_alpha: all tokens of an answer count the same
    default_system: write it into the data, or the chat template
    preserve_thinking: write data.turn_rendering in a native file
    early_stopping_steps: write train.early_stopping in a native file
    image_do_pan_and_scan crop_to_patches: {shared.SIZED}
    video_max_pixels
    video_min_pixels: frames are resized as video_preprocessor_config.json of the model says
    """
)

# Files with `model_name_or_path` and at least two of its own keys.
LLAMA_FACTORY = Dialect(
    name="llama-factory",
    title="LLaMA-Factory",
    recognizes=_recognizes,
    types=typed(
        switch="save_only_model bf16 fp16 packing neat_packing disable_gradient_checkpointing"
        " pure_bf16 fp8_enable_fsdp_float8_all_gather use_muon",
        number="cutoff_len save_steps eval_steps",
        text="template",
    ),
    same={
        "model_name_or_path": "model.model_path",
        "adapter_name_or_path": "lora.init_adapter_path",
        **same_names("train.", "moe_aux_loss_coef sequence_parallel"),
        "train_on_prompt": "data.train_on_prompt",
        "preprocessing_num_workers": "data.dataset_num_proc",
        "hyper_parallel_cp_size": "train.ringattn_parallel_size",
        "upcast_lmhead_output": "model.lm_head_fp32",
        "tensor_model_parallel_size": "train.tensor_parallel_size",
        "pipeline_model_parallel_size": "train.pipeline_parallel_size",
        "expert_model_parallel_size": "train.expert_parallel_size",
        "context_parallel_size": "train.ringattn_parallel_size",
        "fp8": "train.enable_fp8_training",
    },
    computed={
        "stage": _stage,
        **dict.fromkeys(("dataset", "eval_dataset"), sources),
        "interleave_probs": rule.decides(f"{SOURCES}.0.weight"),
        "max_samples": rule.decides(f"{SOURCES}.0.max_samples"),
        "mix_strategy": rule.choice(
            "data.mix_strategy",
            {name: name for name in ("concat", "interleave_under", "interleave_over")},
        ),
        "template": chat_template(LLAMA_FACTORY_TEMPLATES),
        "cutoff_len": _length,
        "packing": _packing,
        "mask_history": rule.put("data.train_on_turns", lambda last: "last" if last else "all"),
        "val_size": rule.put("data.val_set_size", lambda share: share or None),
        "flash_attn": shared.attention,
        **dict.fromkeys((*FREEZES, PROJECTOR_ALONE), _freeze),
        "media_dir": rule.when(
            lambda entry: entry.get("stage") != "pt",
            rule.decides(f"{SOURCES}.0.image_folder"),
            "texts have no images",
        ),
        **dict.fromkeys(BOUNDS, rule.decides()),
        "model_revision": rule.only("main"),
        ON: rule.choice("lora.enable_lora", {"lora": True, "full": False}, rule.refuses),
        **shared.of_adapters(
            ON,
            *WITH_LORA,
            lora_rank="lora_rank",
            lora_alpha="lora_alpha",
            lora_dropout="lora_dropout",
            loraplus_lr_ratio="lora_plus_ratio",
            use_rslora="use_rslora",
            use_dora="use_dora",
        ),
        "lora_target": rule.where(ON, "lora", then=shared.put_targets),
        "quantization_bit": rule.when(
            lambda entry: entry.value in (4, 8), shared.BITS, rule.refuses("it takes 4 and 8")
        ),
        "use_muon": rule.if_on(
            rule.in_turn(
                lambda entry: entry.put("train.muon_lr", entry.get("learning_rate", 5e-5)),
                # Its Muon scales the rate by 0.2 * sqrt(max(rows, columns)), as this does.
                rule.sets({"train.muon_adjust_lr_fn": "match_rms_adamw"}),
                rule.decides("train.optimizer"),
            ),
            "optim says it",
        ),
        "fp8_enable_fsdp_float8_all_gather": shared.gathers_8_bits,
        "quantization_type": rule.only("nf4"),
        "pure_bf16": rule.if_on(rule.decides("train.precision"), "bf16 and fp16 say it"),
        "disable_shuffling": rule.if_on(shared.IN_ORDER, "samples are shuffled"),
        "train_from_scratch": rule.if_on(
            rule.decides("model.config_path"), "weights are those of the model"
        ),
        "enable_thinking": rule.approximated("the chat template says how reasoning is rendered"),
        **dict.fromkeys(
            ("hf_hub_token", "ms_hub_token", "om_hub_token"),
            rule.no_effect("a secret belongs in the environment: set HF_TOKEN"),
        ),
        "disable_gradient_checkpointing": rule.put(
            "train.enable_gradient_checkpointing", lambda off: not off
        ),
        "do_train": rule.when(
            lambda entry: not entry.value and entry.get("do_eval"),
            rule.sets({"train.eval_only": True}),
            "a run trains",
        ),
        "do_eval": rule.no_effect("eval_strategy says when"),
        "preprocessing_batch_size": rule.when(
            lambda entry: entry.get("stage") == "kto",
            rule.decides("preference.kl_rotation_size"),
            "how samples are prepared, which changes none",
        ),
        "pref_beta": _beta,
        "pref_loss": _loss,
        "pref_ftx": rule.when(
            lambda entry: _prefers(entry.draft) and entry.get("pref_loss") != "orpo",
            rule.in_turn(
                rule.put("preference.sft_loss_ratio", float), rule.approximated(OVER_TOKENS)
            ),
            "this stage and loss do not read it",
        ),
        "simpo_gamma": _of_dpo("preference.simpo_gamma", "simpo"),
        "dpo_label_smoothing": _of_dpo("preference.label_smoothing", "sigmoid", "simpo"),
        "kto_chosen_weight": rule.put("preference.desirable_weight"),
        "kto_rejected_weight": rule.put("preference.undesirable_weight"),
    },
    unsupported=UNSUPPORTED,
    idle=IDLE,
    families=FAMILIES,
    defaults={
        **training_arguments.DEFAULTS,
        "stage": "sft",
        ON: "lora",
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "cutoff_len": 2048,
        "bf16": True,
        "gradient_checkpointing": True,
        "pref_beta": 0.1,
        "pref_loss": "sigmoid",
    },
    overridden_by={"gradient_checkpointing": ("disable_gradient_checkpointing",)},
    finalize=_finalize,
).over(training_arguments.TRAINER)
