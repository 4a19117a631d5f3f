"""NxDT (NeuronX Distributed Training): nested files of NeMo's, for Trainium.

Where program and documentation disagree, this is what the documentation says, and the report says
where the program does otherwise.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate.dialect import (
    Dialect,
    Rule,
    Values,
    choice,
    if_true,
    listed,
    no_effect,
    put,
    typed,
    unless_minus_one,
    when,
)
from penstock.config.translate.interpolation import resolve_references
from penstock.config.translate.nxdt import alignment, data, model, optimizer
from penstock.config.translate.nxdt.data import TESTS
from penstock.config.translate.shared import RESUMES, tracks
from penstock.config.translate.translation import Draft, Entry

SECTIONS = ("trainer", "exp_manager", "distributed_strategy")
MANAGER = "exp_manager"
SAVING = f"{MANAGER}.checkpoint_callback_params"

PARTS = {
    "CoreAttention": "core_attn",
    "LlamaMLP": "mlp",
    "ActivationMultiplyMLP": "mlp",
    "NeuronSwitchMLP": "mlp",
}
"""Modules that are recomputed, and our names of what holds them."""

EVALUATING = ("eval_steps", "eval_epochs", "eval_sanity_batches", "eval_max_batches")

METRICS = {"val_loss": "eval_loss", "val_perplexity": "eval_perplexity"}


def _recognizes(values: Values) -> bool:
    return all(isinstance(values.get(name), dict) for name in SECTIONS)


def _evaluations(entry: Entry) -> None:
    every = entry.get("trainer.check_val_every_n_epoch")
    if isinstance(entry.value, float):
        entry.put("train.eval_epochs", entry.value * (every or 1))
        return
    entry.put("train.eval_steps", entry.value)
    if every:
        entry.approximated("steps are counted over the whole run, not within each epoch")


def _every_epochs(entry: Entry) -> None:
    if entry.get("trainer.val_check_interval") is not None:
        entry.decides("train.eval_epochs", "train.eval_steps")
    else:
        entry.put("train.eval_epochs", float(entry.value))


def _folder(entry: Entry) -> None:
    """`explicit_log_dir`, else `exp_dir`/`name`, and in it a version for each new start."""
    explicit = entry.get(f"{MANAGER}.explicit_log_dir")
    above = entry.get(f"{MANAGER}.exp_dir") or "nemo_experiments"
    folder = explicit or f"{above}/{entry.get(f'{MANAGER}.name') or 'default'}"
    entry.put("train.output_dir", folder)
    if not explicit and not entry.get(f"{MANAGER}.resume_if_exists"):
        entry.approximated("all starts share one folder; there each has a version of its own")


AS_HUGGING_FACES = "a folder of Hugging Face's, of which the weights are read; one of NxD's own is"


def _start(entry: Entry) -> None:
    if entry.get("model.weight_init_only"):
        entry.put("train.init_checkpoint_path", entry.value)
        entry.explain(
            f"{AS_HUGGING_FACES} refused before any work; a checkpoint of the run goes before it"
        )
    elif entry.get(f"{MANAGER}.resume_if_exists"):
        entry.put("train.init_checkpoint_path", entry.value)
        entry.approximated(
            f"{AS_HUGGING_FACES} refused before any work, so the optimizer states start from"
            " scratch"
        )
    else:
        entry.put("train.load_checkpoint_path", entry.value)
        entry.explain("a checkpoint of a run made here; one of NxD's own is refused")


def _weights_alone(entry: Entry) -> None:
    if entry.get(f"{MANAGER}.resume_from_checkpoint"):
        entry.decides("train.init_checkpoint_path")
    elif entry.value and entry.get(f"{MANAGER}.resume_if_exists"):
        entry.put("train.load_optimizer", False)
    elif entry.value:
        entry.no_effect("nothing is resumed")
    else:
        entry.no_effect("a run that is resumed takes up all of it")


def _saving(entry: Entry) -> None:
    if not entry.value or entry.get(f"{SAVING}.save_top_k") == 0:
        entry.put("train.save_steps", 0)
    else:
        entry.decides("train.save_steps")
    entry.put("train.save_epochs", 0.0)


def _save_steps(entry: Entry) -> None:
    is_off = entry.get(f"{MANAGER}.create_checkpoint_callback") is False
    if is_off or entry.get(f"{SAVING}.save_top_k") == 0:
        entry.no_effect("nothing is saved but the end")
    else:
        entry.put("train.save_steps", entry.value)


def _kept(entry: Entry) -> None:
    if entry.value == -1:
        entry.no_effect("all are kept")
    elif entry.value == 0:
        entry.decides("train.save_steps")
    else:
        entry.put("train.save_total_limit", entry.value)


def _monitor(entry: Entry) -> None:
    if entry.value in METRICS:
        entry.put("train.save_best.metric", METRICS[entry.value])
    elif entry.value == "step":
        entry.no_effect("the newest are kept")
    else:
        entry.approximated("the newest are kept: no evaluation tells it")


def _shards(entry: Entry) -> None:
    if entry.value:
        entry.put("train.zero_stage", 1)
    else:
        entry.put("train.data_parallel_mode", "ddp")
        entry.explain("master weights are kept as precision.type says; upstream drops them so")


def _copies_of_keys(entry: Entry) -> None:
    if entry.value in (None, 1):
        entry.no_effect("each key head is on one rank")
    else:
        entry.decides("train.tensor_parallel_size")
        entry.explain("a key head is replicated on as many ranks as there are for each")


def _chunks(entry: Entry) -> None:
    if entry.value == 1:
        entry.no_effect("one stage on each rank")
    else:
        entry.put("train.pipeline_parallel_virtual_stages", entry.value)
        entry.put("train.pipeline_parallel_schedule", "Interleaved1F1B")


def _cuts(entry: Entry) -> None:
    """Names of layers (`model.layers.8`) before which the model is cut."""
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


def _ring(entry: Entry) -> None:
    if entry.value:
        entry.decides("train.ringattn_parallel_size")
        entry.explain("context_parallel_size says over how many ranks")
    else:
        entry.no_effect("rows are split over ranks where context_parallel_size says so")


def _finalize(draft: Draft) -> None:
    data.settle_data(draft)
    model.settle_model(draft)
    optimizer.settle_states(draft)
    if not draft.has(TESTS) and not draft.value("data.val_set_size"):
        for name in (*EVALUATING, "save_best"):
            draft.drop(f"train.{name}", "there is nothing to evaluate on")


ON_TRAINIUM = "concerns Trainium's compiler and runtime"
OF_XLA = "checkpoints are written by PyTorch's distributed checkpoints, whatever this says"

IDLE: Mapping[str, str] = {
    "trainer.lnc": ON_TRAINIUM,
    "trainer.sequential_move_factor": "weights are made shard by shard where they will lie",
    "trainer.limit_test_batches": "nothing is tested, there either",
    f"{MANAGER}.save_xser": OF_XLA,
    f"{MANAGER}.load_xser": OF_XLA,
    f"{MANAGER}.save_bf16": "read by nothing, there either",
    f"{MANAGER}.ckpt_ptl_version": "the version of another program's files",
    f"{SAVING}.save_last": "the last step is always saved",
    f"{SAVING}.model_parallel_size": "read by nothing",
    "distributed_strategy.token_shuffle_group_size": "no token is dropped, so none is shuffled",
    "compiler_flags": ON_TRAINIUM,
    "compiler_cache_url": ON_TRAINIUM,
    "aync_exec_max_inflight_requests": ON_TRAINIUM,
    "neuron_rt_exec_timeout": ON_TRAINIUM,
    "neuron_experimental_compress_rg": ON_TRAINIUM,
}

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

COMPUTED: Mapping[str, Rule] = {
    "trainer.max_epochs": unless_minus_one(
        "train.num_train_epochs", "trainer.max_steps ends the run"
    ),
    "trainer.max_steps": unless_minus_one("train.max_steps", "trainer.max_epochs ends the run"),
    "trainer.gradient_clip_val": put("train.max_grad_norm", lambda norm: float(norm or 0)),
    "trainer.val_check_interval": _evaluations,
    "trainer.check_val_every_n_epoch": _every_epochs,
    f"{MANAGER}.create_tensorboard_logger": tracks("tensorboard"),
    f"{MANAGER}.log_local_rank_0_only": choice("train.log_ranks", {True: "local0", False: "all"}),
    **{f"{MANAGER}.{name}": _folder for name in ("explicit_log_dir", "exp_dir", "name")},
    f"{MANAGER}.resume_if_exists": RESUMES,
    f"{MANAGER}.resume_ignore_no_checkpoint": when(
        lambda entry: entry.get(f"{MANAGER}.resume_if_exists"),
        put("train.require_checkpoint", lambda ignores: not ignores),
        "read with resume_if_exists alone",
    ),
    f"{MANAGER}.resume_from_checkpoint": _start,
    "model.weight_init_only": _weights_alone,
    f"{MANAGER}.create_checkpoint_callback": _saving,
    f"{SAVING}.every_n_train_steps": _save_steps,
    f"{SAVING}.save_top_k": _kept,
    f"{SAVING}.monitor": _monitor,
    f"{SAVING}.mode": when(
        lambda entry: entry.get(f"{SAVING}.monitor") in METRICS,
        put("train.save_best.mode"),
        "the newest are kept",
    ),
    f"{SAVING}.use_master_weights_in_ckpt": if_true(
        "train.ckpt_weights",
        "master",
        otherwise="checkpoints hold master weights, there beside the optimizer's states",
    ),
    "distributed_strategy.kv_replicator": _copies_of_keys,
    "distributed_strategy.zero1": _shards,
    "bucket_size_collectives": when(
        lambda entry: entry.get("distributed_strategy.zero1") is False,
        put("train.comm_bucket_mb"),
        "sharded gradients are added up layer by layer",
    ),
    "distributed_strategy.virtual_pipeline_model_parallel_size": _chunks,
    "model.pipeline_cuts": _cuts,
    "model.activations_checkpoint_granularity": _recomputing,
    "model.activations_checkpoint_recompute": _recomputed,
    "model.fusions.ring_attention": _ring,
    **alignment.COMPUTED,
    **data.COMPUTED,
    **model.COMPUTED,
    **optimizer.COMPUTED,
    **{name: no_effect(why) for name, why in IDLE.items()},
}

DEFAULTS: Mapping[str, Any] = {
    f"{MANAGER}.name": "default",
    f"{MANAGER}.create_checkpoint_callback": True,
    f"{MANAGER}.log_local_rank_0_only": False,
    f"{MANAGER}.log_gradient_norm": False,
    "trainer.gradient_clip_val": 0.0,
    "model.activations_checkpoint_granularity": None,
    **alignment.DEFAULTS,
    **data.DEFAULTS,
    **model.DEFAULTS,
    **optimizer.DEFAULTS,
}

NXDT = Dialect(
    name="nxdt",
    title="NxDT",
    recognizes=_recognizes,
    same=SAME,
    computed=COMPUTED,
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
"""Files with `trainer`, `exp_manager` and `distributed_strategy`."""
