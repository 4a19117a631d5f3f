"""NxDT (NeuronX Distributed Training): nested files of NeMo's, for Trainium.

Where program and documentation disagree, this is what the documentation says, and the report says
where the program does otherwise.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.dialect import Dialect, by_reason, listed, typed
from penstock.config.translate.interpolation import resolve_references
from penstock.config.translate.nxdt import data, model, optimizer
from penstock.config.translate.nxdt.data import DPO, ORPO, PEFT
from penstock.config.translate.shared import PRECOMPUTES, RESUMES, TESTS, tracks
from penstock.config.translate.translation import Draft, Entry, Rule

SECTIONS = ("trainer", "exp_manager", "distributed_strategy")
MANAGER = "exp_manager"
SAVING = f"{MANAGER}.checkpoint_callback_params"
START = f"{MANAGER}.resume_from_checkpoint"

# Modules that are recomputed, and our names of what holds them.
PARTS = {
    "CoreAttention": "core_attn",
    "LlamaMLP": "mlp",
    "ActivationMultiplyMLP": "mlp",
    "NeuronSwitchMLP": "mlp",
}

EVALUATING = ("eval_steps", "eval_epochs", "eval_sanity_batches", "eval_max_batches")

METRICS = {"val_loss": "eval_loss", "val_perplexity": "eval_perplexity"}


def _evaluations(entry: Entry) -> None:
    every = entry.get("trainer.check_val_every_n_epoch")
    if isinstance(entry.value, float):
        entry.put("train.eval_epochs", entry.value * (every or 1))
        return
    entry.put("train.eval_steps", entry.value)
    if every:
        entry.approximated("steps are counted over the whole run, not within each epoch")


def _folder(entry: Entry) -> None:
    # `explicit_log_dir`, else `exp_dir`/`name`, and in it a version for each new start.
    explicit = entry.get(f"{MANAGER}.explicit_log_dir")
    above = entry.get(f"{MANAGER}.exp_dir") or "nemo_experiments"
    folder = explicit or f"{above}/{entry.get(f'{MANAGER}.name') or 'default'}"
    entry.put("train.output_dir", folder)
    if not explicit and not entry.get(f"{MANAGER}.resume_if_exists"):
        entry.approximated("all starts share one folder; there each has a version of its own")


AS_HUGGING_FACES = (
    "a folder of Hugging Face's, of which the weights are read; one of NxD's own is refused before"
    " any work"
)


def _start(entry: Entry) -> None:
    if entry.get("model.weight_init_only"):
        entry.put("train.init_checkpoint_path", entry.value)
        entry.explain(f"{AS_HUGGING_FACES}; a checkpoint of the run goes before it")
    elif entry.get(f"{MANAGER}.resume_if_exists"):
        entry.put("train.init_checkpoint_path", entry.value)
        entry.approximated(f"{AS_HUGGING_FACES}, so the optimizer states start from scratch")
    else:
        entry.put("train.load_checkpoint_path", entry.value)
        entry.explain("a checkpoint of a run made here; one of NxD's own is refused")


def _weights_alone(entry: Entry) -> None:
    if entry.get(START):
        entry.decides("train.init_checkpoint_path")
    elif not entry.value:
        entry.no_effect("a run that is resumed takes up all of it")
    elif entry.get(f"{MANAGER}.resume_if_exists"):
        entry.put("train.load_optimizer", False)
    else:
        entry.no_effect("nothing is resumed")


def _cuts(entry: Entry) -> None:
    # Names of layers (`model.layers.8`) before which the model is cut.
    numbers = [str(name).rpartition(".")[2] for name in listed(entry.value)]
    if all(number.isdecimal() for number in numbers):
        entry.put("train.pipeline_parallel_split", [0, *map(int, numbers)])
    else:
        entry.leave_out("it takes names of layers that end with their number, as model.layers.8")


def _recomputing(entry: Entry) -> None:
    entry.put("train.enable_gradient_checkpointing", entry.value is not None)
    if entry.value not in (None, "full", "selective"):
        entry.leave_out("it takes full, selective and null")


def _recomputed(entry: Entry) -> None:
    if entry.get("model.activations_checkpoint_granularity") != "selective":
        entry.no_effect("read with activations_checkpoint_granularity: selective alone")
        return
    written = [str(name) for name in listed(entry.value)]
    parts = sorted({PARTS[name] for name in written if name in PARTS})
    foreign = [name for name in written if name not in (*PARTS, "LlamaDecoderLayer")]
    if "LlamaDecoderLayer" in written or not parts:
        entry.decides("train.enable_gradient_checkpointing")
        entry.explain("whole layers")
    else:
        entry.put("train.recompute_modules", parts)
    if foreign:
        entry.approximated(f"{', '.join(foreign)} is not known, and ignored upstream too")


# Fused layers, and what checkpoints call their parts.
TARGETS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _loss(entry: Entry) -> None:
    entry.put("preference.loss_type", "sigmoid")
    if entry.value != "sigmoid":
        entry.approximated("the loss is sigmoid whatever this says, there too")


def _prefer(name: str, loss: str) -> Rule:
    # The rule of the one key of a strategy that weighs its loss; it chooses the strategy too.
    def apply(entry: Entry) -> None:
        strategy = entry.key.rpartition(".")[0]
        if entry.is_assumed and not _has(entry.draft, strategy):
            return
        entry.put("train.objective", "preference")
        entry.put("preference.loss_type", loss)
        entry.put(name, entry.value)
        if loss == "orpo":
            entry.approximated(
                "the SFT loss of chosen completions is a mean over tokens, not over completions"
            )

    return apply


def _has(draft: Draft, strategy: str) -> bool:
    return any(key.startswith(f"{strategy}.") for key in draft.written)


def _is_asked_for(entry: Entry) -> bool:
    return not entry.is_assumed or _has(entry.draft, PEFT)


def _adapters(entry: Entry) -> None:
    if _is_asked_for(entry):
        entry.put("lora.enable_lora", True)
        entry.put(f"lora.{entry.key.rpartition('.')[2]}", entry.value)


def _targets(entry: Entry) -> None:
    if not _is_asked_for(entry):
        return
    names = [str(name) for name in listed(entry.value)]
    parts = [part for name in names for part in TARGETS.get(name, (name,))]
    entry.put("lora.lora_target_modules", parts)
    if fused := [name for name in names if name in TARGETS]:
        entry.approximated(
            f"{', '.join(fused)}: each part has a pair A, B of its own, where fused layers share"
            " their A; start values and counts of trained parameters differ"
        )


def _finalize(draft: Draft) -> None:
    data.settle_data(draft)
    model.settle_model(draft)
    optimizer.settle_states(draft)
    if not draft.has(TESTS) and not draft.value("data.val_set_size"):
        for name in (*EVALUATING, "save_best"):
            draft.drop(f"train.{name}", "there is nothing to evaluate on")


OF_ADAPTER_FILES = "how adapters lie in NxD's own files; here they lie as peft writes them"
OF_XLA = "checkpoints are written by PyTorch's distributed checkpoints, whatever this says"

IDLE = by_reason(
    f"""
    trainer.lnc compiler_flags compiler_cache_url aync_exec_max_inflight_requests
    neuron_rt_exec_timeout
    neuron_experimental_compress_rg: concerns Trainium's compiler and runtime
    trainer.sequential_move_factor: weights are made shard by shard where they will lie
    trainer.limit_test_batches: nothing is tested, there either
    {MANAGER}.save_xser {MANAGER}.load_xser: {OF_XLA}
    {MANAGER}.save_bf16 precision.fp32_grads_cc: read by nothing, there either
    {MANAGER}.ckpt_ptl_version: the version of another program's files
    {SAVING}.save_last: the last step is always saved
    {SAVING}.model_parallel_size: read by nothing
    distributed_strategy.token_shuffle_group_size: no token is dropped, so none is shuffled
    {PEFT}.lora_verbose {PEFT}.save_lora_config_adapter
    {PEFT}.merge_sharded_lora: {OF_ADAPTER_FILES}
    data.tokenizer.merge_file: read beside vocab_file
    data.tokenizer.library data.tokenizer.model data.tokenizer.delimiter
    data.tokenizer.sentencepiece_legacy
    data.tokenizer.use_fast: the tokenizer is read by transformers, whatever this says
    data.data_impl data.skip_warmup: how Megatron reads its files, which changes no sample
    data.no_seqlen_plus_one_input_tokens: labels are shifted when rows are packed
    data.validation_drop_last: an evaluation takes every row, however many there are
    data.pad_samples_to_global_batch_size: {data.DROPS_ROWS}
    data.use_sft_style_data_module: train_dir says what it holds
    model.qkv_linear: any number of heads may share keys and values
    model.fusions.softmax: the attention kernel decides how it computes its softmax
    model.apply_query_key_layer_scaling: guards a softmax in few bits; here it has 32
    model.persist_layer_norm: a choice of kernels on GPUs, which is made by itself
    model.transpose_nki_inputs: a layout of Trainium's kernels
    model.save_logits: logits are never kept
    model.moe.sinkhorn_iterations
    model.moe.sinkhorn_tol: read by sinkhorn routing alone, which is refused
    model.optim.luc_trust model.optim.luc_eps: read with luc alone
    model.optim.capturable: concerns CUDA graphs of the optimizer
    {optimizer.SCHEDULE}.max_steps: trainer.max_steps overrides it, there too
    """
)

SAME: Mapping[str, str] = {
    "name": "pipeline.name",
    "seed": "train.seed",
    "trainer.devices": "launch.nproc_per_node",
    "trainer.num_nodes": "launch.nnodes",
    "trainer.log_every_n_steps": "train.log_interval",
    "trainer.num_sanity_val_steps": "train.eval_sanity_batches",
    "trainer.limit_val_batches": "train.eval_max_batches",
    f"{SAVING}.filename": "train.ckpt_name",
    "precision.parallel_layers_reduce_dtype": "train.tp_reduce_dtype",
    f"{MANAGER}.enable_recovery_time_instrumentation": "train.log_recovery_timing",
    f"{MANAGER}.log_parameter_norm": "train.log_param_norm",
    f"{MANAGER}.log_gradient_norm": "train.log_grad_norm",
    f"{MANAGER}.async_checkpointing": "train.save_async",
    "distributed_strategy.tensor_model_parallel_size": "train.tensor_parallel_size",
    "distributed_strategy.pipeline_model_parallel_size": "train.pipeline_parallel_size",
    "distributed_strategy.context_parallel_size": "train.ringattn_parallel_size",
    "distributed_strategy.expert_model_parallel_size": "train.expert_parallel_size",
    "distributed_strategy.sequence_parallel": "train.sequence_parallel",
    **data.SAME,
    **model.SAME,
    **optimizer.SAME,
}

ALIGNMENT: Mapping[str, Rule] = {
    f"{DPO}.kl_beta": _prefer("preference.beta", "sigmoid"),
    f"{DPO}.loss_type": _loss,
    f"{DPO}.precompute_ref_log_probs": PRECOMPUTES,
    f"{ORPO}.beta": _prefer("preference.pref_loss_ratio", "orpo"),
    **{f"{PEFT}.lora_{name}": _adapters for name in ("rank", "alpha", "dropout", "bias")},
    f"{PEFT}.target_modules": _targets,
    f"{PEFT}.save_lora_base": rule.if_on(
        rule.no_effect("an export holds the model and the adapter"),
        rule.sets({"lora.save_lora_only": True}),
    ),
    f"{PEFT}.merge_lora": rule.when(
        lambda entry: entry.get(f"{PEFT}.save_lora_base") is not False,
        rule.put("export.merge_lora", bool),
        "save_lora_base: false keeps the adapter alone",
    ),
    f"{PEFT}.load_lora_from_ckpt": rule.when(
        lambda entry: entry.value and entry.get(START),
        rule.in_turn(
            lambda entry: entry.put("lora.init_adapter_path", entry.get(START)),
            rule.approximated("name a folder with adapter_config.json, as peft writes it"),
        ),
        "adapters are initialized from scratch",
    ),
}

COMPUTED: Mapping[str, Rule] = {
    "trainer.max_epochs": rule.unless_minus_one(
        "train.num_train_epochs", "trainer.max_steps ends the run"
    ),
    "trainer.max_steps": rule.unless_minus_one(
        "train.max_steps", "trainer.max_epochs ends the run"
    ),
    "trainer.gradient_clip_val": rule.put("train.max_grad_norm", lambda norm: float(norm or 0)),
    "trainer.val_check_interval": _evaluations,
    "trainer.check_val_every_n_epoch": rule.when(
        lambda entry: entry.get("trainer.val_check_interval") is not None,
        rule.decides("train.eval_epochs", "train.eval_steps"),
        rule.put("train.eval_epochs", float),
    ),
    f"{MANAGER}.create_tensorboard_logger": tracks("tensorboard"),
    f"{MANAGER}.log_local_rank_0_only": rule.choice(
        "train.log_ranks", {True: "local0", False: "all"}
    ),
    **{f"{MANAGER}.{name}": _folder for name in ("explicit_log_dir", "exp_dir", "name")},
    f"{MANAGER}.resume_if_exists": RESUMES,
    f"{MANAGER}.resume_ignore_no_checkpoint": rule.when(
        f"{MANAGER}.resume_if_exists",
        rule.put("train.require_checkpoint", lambda ignores: not ignores),
        "read with resume_if_exists alone",
    ),
    START: _start,
    "model.weight_init_only": _weights_alone,
    f"{MANAGER}.create_checkpoint_callback": rule.in_turn(
        rule.when(
            lambda entry: entry.value and entry.get(f"{SAVING}.save_top_k") != 0,
            rule.decides("train.save_steps"),
            rule.sets({"train.save_steps": 0}),
        ),
        rule.sets({"train.save_epochs": 0.0}),
    ),
    f"{SAVING}.every_n_train_steps": rule.when(
        lambda entry: (
            entry.get(f"{MANAGER}.create_checkpoint_callback") is not False
            and entry.get(f"{SAVING}.save_top_k") != 0
        ),
        rule.put("train.save_steps"),
        "nothing is saved but the end",
    ),
    f"{SAVING}.save_top_k": rule.when(
        lambda entry: entry.value != 0,
        rule.unless_minus_one("train.save_total_limit", "all are kept"),
        rule.decides("train.save_steps"),
    ),
    f"{SAVING}.monitor": rule.when(
        lambda entry: entry.value in METRICS,
        rule.put("train.save_best.metric", METRICS.get),
        rule.when(
            lambda entry: entry.value == "step",
            rule.no_effect("the newest are kept"),
            rule.approximated("the newest are kept: no evaluation tells it"),
        ),
    ),
    f"{SAVING}.mode": rule.when(
        lambda entry: entry.get(f"{SAVING}.monitor") in METRICS,
        rule.put("train.save_best.mode"),
        "the newest are kept",
    ),
    f"{SAVING}.use_master_weights_in_ckpt": rule.if_true(
        "train.ckpt_weights",
        "master",
        otherwise="checkpoints hold master weights, there beside the optimizer's states",
    ),
    "distributed_strategy.kv_replicator": rule.when(
        lambda entry: entry.value not in (None, 1),
        rule.explained(
            rule.decides("train.tensor_parallel_size"),
            "a key head is replicated on as many ranks as there are for each",
        ),
        "each key head is on one rank",
    ),
    "distributed_strategy.zero1": rule.if_on(
        rule.sets({"train.zero_stage": 1}),
        rule.sets(
            {"train.data_parallel_mode": "ddp"},
            "master weights are kept as precision.type says; upstream drops them so",
        ),
    ),
    "bucket_size_collectives": rule.when(
        lambda entry: entry.get("distributed_strategy.zero1") is False,
        rule.put("train.comm_bucket_mb"),
        "sharded gradients are added up layer by layer",
    ),
    "distributed_strategy.virtual_pipeline_model_parallel_size": rule.when(
        lambda entry: entry.value != 1,
        rule.in_turn(
            rule.put("train.pipeline_parallel_virtual_stages"),
            rule.sets({"train.pipeline_parallel_schedule": "Interleaved1F1B"}),
        ),
        "one stage on each rank",
    ),
    "model.pipeline_cuts": _cuts,
    "model.activations_checkpoint_granularity": _recomputing,
    "model.activations_checkpoint_recompute": _recomputed,
    "model.fusions.ring_attention": rule.if_on(
        rule.explained(
            rule.decides("train.ringattn_parallel_size"),
            "context_parallel_size says over how many ranks",
        ),
        "rows are split over ranks where context_parallel_size says so",
    ),
    **ALIGNMENT,
    **data.COMPUTED,
    **model.COMPUTED,
    **optimizer.COMPUTED,
}

DEFAULTS: Mapping[str, Any] = {
    f"{MANAGER}.name": "default",
    f"{MANAGER}.create_checkpoint_callback": True,
    f"{MANAGER}.log_local_rank_0_only": False,
    f"{MANAGER}.log_gradient_norm": False,
    "trainer.gradient_clip_val": 0.0,
    "model.activations_checkpoint_granularity": None,
    # Assumed where such a strategy is written.
    f"{DPO}.kl_beta": 0.01,
    f"{ORPO}.beta": 0.01,
    f"{PEFT}.lora_rank": 16,
    f"{PEFT}.lora_alpha": 32,
    f"{PEFT}.lora_dropout": 0.05,
    f"{PEFT}.target_modules": ["qkv_proj"],
    **data.DEFAULTS,
    **model.DEFAULTS,
    **optimizer.DEFAULTS,
}

# Files with `trainer`, `exp_manager` and `distributed_strategy`.
NXDT = Dialect(
    name="nxdt",
    title="NxDT",
    recognizes=lambda values: all(isinstance(values.get(name), dict) for name in SECTIONS),
    same=SAME,
    computed=COMPUTED,
    idle=IDLE,
    types=typed(
        switch="exp_manager.create_tensorboard_logger exp_manager.resume_if_exists"
        " exp_manager.resume_ignore_no_checkpoint exp_manager.create_checkpoint_callback"
        " exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt model.has_bias"
        " distributed_strategy.zero1 model.do_layer_norm_weight_decay model.weight_init_only"
        " model.fusions.ring_attention model.moe.dropless model.moe.output_router_logits"
        " model_alignment_strategy.dpo.precompute_ref_log_probs model.use_scaled_init_method"
        " model_alignment_strategy.sft.packing model_alignment_strategy.peft.merge_lora"
        " model_alignment_strategy.peft.load_lora_from_ckpt data.reset_position_ids data.packing"
        " data.reset_attention_mask model.share_embeddings_and_output_weights",
        number="distributed_strategy.kv_replicator model.max_position_embeddings model.num_layers"
        " model.hidden_size model.moe.num_experts model.moe.top_k model.ffn_hidden_size"
        " model.num_attention_heads model.sliding_window_size model.rope_theta"
        " model.moe.capacity_factor model.init_method_std",
        text="exp_manager.name data.train_dir data.val_dir data.splits_string"
        " data.tokenizer.vocab_file model_alignment_strategy.dpo.loss_type",
    ),
    defaults=DEFAULTS,
    overridden_by={
        **optimizer.BEATEN,
        f"{MANAGER}.name": (f"{MANAGER}.explicit_log_dir",),
        f"{MANAGER}.exp_dir": (f"{MANAGER}.explicit_log_dir",),
    },
    meaningful_nulls=frozenset(
        {"model.activations_checkpoint_granularity", "trainer.gradient_clip_val"}
    ),
    prepare=resolve_references,
    finalize=_finalize,
)
