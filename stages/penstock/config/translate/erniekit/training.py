"""ERNIEKit's training: precision, optimizer, learning rate, dropout, memory, and how a model is cut
over ranks."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.shared import quantizes
from penstock.config.translate.translation import Entry, Rule

PRECISIONS = {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}
QUANTIZED = {
    "wint8": "int8",
    "weight_only_int8": "int8",
    "wint4/8": "int8_int4_experts",
    "weight_only_mix": "int8_int4_experts",
    "nf4": "nf4",
}
EIGHT_BITS = ("fp8", "fp8_linear", "fp8linear")


def _compute(entry: Entry) -> None:
    kind = str(entry.value)
    if kind not in (*PRECISIONS, *QUANTIZED, *EIGHT_BITS):
        entry.refuse("it takes bf16, fp16, fp8, wint8, wint4/8, nf4")
        return
    if entry.key == "compute_type":
        precise = entry.get("fp16_opt_level") != "O0"
        entry.put("train.precision", PRECISIONS.get(kind, "bf16_mixed") if precise else "fp32")
    if kind in EIGHT_BITS:
        entry.put("train.enable_fp8_training", True)
        entry.put("train.fp8.recipe", "tensorwise")
    elif kind in QUANTIZED:
        quantizes(QUANTIZED[kind])(entry)
    elif entry.key != "compute_type":
        entry.no_effect("says only what is computed in")


def _is_fp8(entry: Entry) -> bool:
    chosen = entry.get("compute_type", entry.get("weight_quantize_algo"))
    return chosen in EIGHT_BITS


def _master_gradients(entry: Entry) -> None:
    if entry.draft.value("train.precision") == "fp32" or (
        entry.get("compute_type") is None and not entry.get("bf16")
    ):
        entry.no_effect("all is computed in fp32")
        return
    kind = "fp32" if entry.value else "bf16"
    entry.put("train.grad_accum_dtype", kind)
    entry.put("train.fsdp_reduce_dtype", kind)


IN_BF16 = (
    *("lookup_table", "lookup_table_v2", "flash_attn", "flash_attn_v1", "matmul", "matmul_v2"),
    "fused_gemm_epilogue",
)
IN_FP32 = (
    *("reduce_sum", "softmax_with_cross_entropy", "c_softmax_with_cross_entropy"),
    *("elementwise_div", "sin", "cos"),
)


def _operations(operations: tuple[str, ...], dtype: str) -> Rule:
    def apply(entry: Entry) -> None:
        value: Any = entry.value
        names = [str(name) for name in value] if isinstance(value, list) else str(value).split()  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if unknown := [name for name in names if name not in operations]:
            entry.approximated(f"{', '.join(unknown)} is computed as everything around it")
        else:
            entry.no_effect(f"these are computed in {dtype} anyway")

    return apply


BETAS = ("adam_beta1", "adam_beta2")


def _optimizer(entry: Entry) -> None:
    if not entry.draft.has("train.optimizer"):
        entry.put("train.optimizer", "adamw")
    entry.decides("train.optimizer")
    if entry.value not in ("adamw", "adamw_custom"):
        entry.approximated(f"{entry.value} is no optimizer here; AdamW takes its place")


STYLES = {
    "linear": "linear",
    "cosine": "cosine",
    "polynomial": "polynomial",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def _schedule(entry: Entry) -> None:
    if entry.value not in STYLES:
        entry.refuse(f"it takes {', '.join(STYLES)}")
        return
    entry.put("train.lr_decay_style", STYLES[entry.value])
    if entry.value == "linear":
        entry.put("train.lr_min", 0.0)
    if entry.value == "constant":
        entry.put("train.lr_warmup_steps", 0)


def _warmup(entry: Entry) -> None:
    if entry.get("lr_scheduler_type") == "constant":
        entry.no_effect("lr_scheduler_type constant has no warmup")
    elif entry.key == "warmup_ratio" and entry.get("warmup_steps"):
        entry.no_effect("warmup_steps is written, and overrides it")
    elif entry.key == "warmup_ratio":
        entry.put("train.lr_warmup_ratio", entry.value)
    elif not entry.value and entry.get("warmup_ratio"):
        entry.no_effect("0 steps leave it to warmup_ratio")
    else:
        entry.put("train.lr_warmup_steps", entry.value)


def _decay_steps(entry: Entry) -> None:
    total: Any = entry.get("max_steps")
    if isinstance(total, int) and total > 0:
        entry.put("train.lr_decay_ratio", min(1.0, entry.value / total))
    else:
        entry.refuse("needs max_steps, of which it is a share here; write max_steps")


DROPPED = {"hidden_dropout_prob": "hidden", "attention_probs_dropout_prob": "attention"}


def _dropout(entry: Entry) -> None:
    if not entry.value:
        entry.no_effect("nothing is dropped")
        return
    name = DROPPED[entry.key]
    entry.put(f"train.dropout.{name}", entry.value)
    entry.put("train.dropout.depth_scaling", True)
    if name == "attention":
        entry.explain("attention is plain then, in memory that grows with the square of a sample")


def _dropout_warmup(entry: Entry) -> None:
    if any(map(entry.get, DROPPED)):
        entry.put("train.dropout.warmup_steps", entry.value)
        entry.doubtful(
            "dropout rises over these steps and stays, as in their program; their text says that it"
            " ends then, and that 0 is no dropout: leave the probabilities out for that"
        )
    else:
        entry.no_effect("nothing is dropped")


def _granularity(entry: Entry) -> None:
    parts = {"full": None, "full_attn": ["self_attn"], "core_attn": ["core_attn"]}
    if not entry.get("recompute"):
        entry.no_effect("recompute is false")
    elif entry.value not in parts:
        entry.refuse(f"it takes {', '.join(parts)}")
    else:
        entry.put("train.recompute_modules", parts[entry.value])


def _recompute_experts(entry: Entry) -> None:
    modules: Any = entry.get("recompute_granularity")
    if entry.value and entry.get("recompute") and modules in ("full_attn", "core_attn"):
        attention = "self_attn" if modules == "full_attn" else "core_attn"
        entry.put("train.recompute_modules", [attention, "mlp"])
    else:
        entry.no_effect("whole layers are recomputed" if entry.value else "is off")


def _of_fp8(name: str) -> Rule:
    return rule.when(_is_fp8, rule.put(name), "there is no FP8 training")


# Keys of activations' scales that are kept from earlier steps, and their defaults.
OLD_SCALES = {"apply_online_actscale_step": 200, "actscale_moving_rate": 0.01}


def _old_scales(entry: Entry) -> None:
    default = OLD_SCALES[entry.key]
    if not _is_fp8(entry):
        entry.no_effect("there is no FP8 training")
    elif entry.value == default:
        entry.no_effect("the default; scales are computed from the current numbers in every step")
    else:
        entry.refuse(
            "scales are computed from the current numbers in every step, and never kept from"
            f" earlier ones; leave it out, or write {default}, the default"
        )


TRAINING: Mapping[str, Rule] = {
    "compute_type": _compute,
    "weight_quantize_algo": _compute,
    "bf16": rule.put("train.precision", lambda on: "bf16_mixed" if on else "fp32"),
    "fp16_opt_level": rule.when(
        lambda entry: entry.value == "O0",
        rule.sets({"train.precision": "fp32"}),
        "weights are kept in fp32 beside what is computed in fewer bits, as in O2",
    ),
    "scale_loss": rule.when(
        lambda entry: entry.get("compute_type") == "fp16",
        rule.put("train.loss_scale_init", float),
        "losses are scaled in fp16 alone",
    ),
    "amp_master_grad": _master_gradients,
    "amp_custom_white_list": _operations(IN_BF16, "bf16"),
    "amp_custom_black_list": _operations(IN_FP32, "fp32"),
    "gradient_accumulation_steps": rule.when(
        lambda entry: entry.value == -1,
        rule.refuses("-1 chooses it by the size of the data; write a number"),
        rule.put("train.gradient_accumulation_steps"),
    ),
    "weight_decay": rule.in_turn(
        rule.put("train.weight_decay"), rule.sets({"train.no_decay_params": ["bias", "norm"]})
    ),
    **dict.fromkeys(
        BETAS,
        lambda entry: entry.put("train.optimizer_kwargs.betas", [entry.get(key) for key in BETAS]),
    ),
    "adam_epsilon": rule.put("train.optimizer_kwargs.eps"),
    "optim": _optimizer,
    "use_lowprecision_moment": rule.if_on(
        rule.sets({"train.optimizer": "anyprecision_adamw", "train.optimizer_dtype": "bf16"}),
        "states are kept in fp32",
    ),
    "offload_optim": rule.if_on(rule.sets({"train.optimizer_offload": "cpu"}), "is off"),
    "tensorwise_offload_optimizer": rule.if_on(
        rule.sets(
            {"train.optimizer_offload": "cpu"},
            "states lie in host memory, where the CPU steps the optimizer",
        ),
        "is off",
    ),
    "lr_scheduler_type": _schedule,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup,
    "min_lr": rule.where("lr_scheduler_type", "cosine", then="train.lr_min"),
    "num_cycles": rule.where(
        "lr_scheduler_type", "cosine", then="train.lr_schedule_kwargs.num_cycles"
    ),
    "lr_end": rule.where("lr_scheduler_type", "polynomial", then="train.lr_min"),
    "power": rule.where("lr_scheduler_type", "polynomial", then="train.lr_schedule_kwargs.power"),
    "decay_steps": _decay_steps,
    "max_grad_norm": rule.put("train.max_grad_norm", lambda norm: max(0.0, float(norm))),
    "hidden_dropout_prob": _dropout,
    "attention_probs_dropout_prob": _dropout,
    "dropout_warmup_steps": _dropout_warmup,
    "use_fused_head_and_loss_fn": rule.if_true(
        "train.ce_mode",
        "chunked",
        otherwise="the head and the loss are computed in chunks all the same",
    ),
    "recompute_granularity": _granularity,
    "use_recompute_moe": _recompute_experts,
    "apply_hadamard": _of_fp8("train.fp8.hadamard"),
    "hadamard_block_size": _of_fp8("train.fp8.hadamard_block_size"),
    "quant_input_grad": _of_fp8("train.fp8.quantize_input_grad"),
    "quant_weight_grad": _of_fp8("train.fp8.quantize_weight_grad"),
    "fp8_format_type": _of_fp8("train.fp8.format"),
    "apply_online_actscale_step": _old_scales,
    "actscale_moving_rate": _old_scales,
}


# Words of `pipeline_parallel_config` for micro-batches of different lengths.
OF_LENGTHS = {"disable_p2p_cache_shape", "enable_clear_every_step_cache"}

SPLIT = "train.pipeline_parallel_split"


def _segments(entry: Entry) -> None:
    # Boundaries count the embedding as their first layer, and have one entry more than stages.
    # A list, or text that looks like one.
    bounds = [int(number) for number in re.findall(r"\d+", str(entry.value))]
    if str(entry.value).strip().startswith("["):
        entry.put(SPLIT, [max(0, bound - 1) for bound in bounds[:-1]])
    else:
        entry.put(SPLIT, "uniform")


def _tail(entry: Entry) -> None:
    if not entry.value or entry.get("pipeline_parallel_degree", 1) <= 1:
        entry.no_effect("is off" if not entry.value else "there is one pipeline stage")
    elif str(entry.get("pp_seg_method", "")).strip().startswith("["):
        entry.no_effect("pp_seg_method lists the layers of each stage")
    else:
        entry.put("train.pipeline_parallel_output_weight", 1 + entry.value)
        entry.explain("empty layers take the place of layers in the split, and compute nothing")


def _sharding(entry: Entry) -> None:
    options = str(entry.value).split()
    stages = [int(option[-1]) for option in options if re.fullmatch(r"stage[123]", option)]
    if stages:
        entry.put("train.data_parallel_mode", "fsdp2")
        entry.put("train.zero_stage", stages[0])
    else:
        entry.put("train.data_parallel_mode", "ddp")
    if "offload" in options:
        entry.put("train.optimizer_offload", "cpu")


def _experts(entry: Entry) -> None:
    group = str(entry.value)
    tensor, shards = (
        entry.get("tensor_parallel_degree", 1),
        entry.get("sharding_parallel_degree", 1),
    )
    sizes = {"mp": tensor, "data": shards, "dp": shards, "dummy": 1}
    if group not in sizes:
        entry.refuse(f"it takes {', '.join(sizes)}")
        return
    entry.put("train.expert_parallel_size", max(1, sizes[group]))
    if group in ("data", "dp") and sizes[group] < 1:
        entry.approximated("experts are on every rank; write expert_parallel_size to share them")


# Words of which their names of a dispatch are made.
DISPATCHES = {"v2", "alltoall", "allgather", "unpad", "text", ""}


def _dispatch(entry: Entry) -> None:
    options = set(str(entry.value).split("-"))
    if not options <= DISPATCHES:
        entry.refuse("it takes v2-alltoall-unpad, v2-alltoall, v2-allgather-unpad, v2-allgather")
        return
    entry.put("model.ep_dispatch", "alltoall")
    if "alltoall" in options:
        entry.explain("tokens travel to the ranks of their experts, without padding")
    else:
        entry.explain("tokens travel by all-to-all, which gives the same result")


LAYOUT: Mapping[str, Rule] = {
    "tensor_parallel_degree": rule.put("train.tensor_parallel_size", lambda ranks: max(1, ranks)),
    "tensor_parallel_config": rule.no_effect(
        "ranks compute the same of what they all hold, and overlapping changes nothing"
    ),
    "pipeline_parallel_degree": rule.put(
        "train.pipeline_parallel_size", lambda ranks: max(1, ranks)
    ),
    "pipeline_parallel_config": rule.when(
        lambda entry: OF_LENGTHS & {*str(entry.value).split()},
        rule.sets({"train.pp_variable_seq_lengths": True}),
        "ways to overlap or release, which change no result",
    ),
    "pp_seg_method": _segments,
    "virtual_pp_degree": rule.when(
        lambda entry: entry.value > 1,
        rule.in_turn(
            rule.sets({"train.pipeline_parallel_schedule": "Interleaved1F1B"}),
            rule.put("train.pipeline_parallel_virtual_stages"),
        ),
        "every rank has one stage",
    ),
    "add_tail_layers": _tail,
    "sharding": _sharding,
    "sharding_parallel_degree": rule.when(
        lambda entry: entry.value > 0 and "stage" not in str(entry.get("sharding", "")),
        rule.no_effect("sharding names no stage, so nothing is sharded"),
        rule.put("train.data_parallel_shard_size", lambda ranks: ranks if ranks > 0 else -1),
    ),
    "sequence_parallel": rule.truth("train.sequence_parallel"),
    "moe_group": _experts,
    "moe_multimodal_dispatch_use_allgather": _dispatch,
}
