"""Invalid combinations of FP8 and QLoRA settings."""

from penstock.config.loading.fault import ConfigIssue, shown
from penstock.config.rules.data import Issues
from penstock.config.schema.quantization import GROUPS
from penstock.config.schema.run import RunConfig

SHARDING_AXES = ("tensor_parallel_size", "ulysses_parallel_size", "ringattn_parallel_size")
"""Axes whose ranks hold shards of the operands of a matmul and reduce scales."""


def _check_fp8_with_qlora(run: RunConfig) -> Issues:
    if run.train.enable_fp8_training and run.lora.enable_qlora:
        yield ConfigIssue(
            ("train", "enable_fp8_training"),
            "lora.enable_qlora: true dequantizes base weights and runs their matmuls in the run's"
            " precision; leave one of the two out",
            ("lora.enable_qlora",),
        )


def _check_fp8_precision(run: RunConfig) -> Issues:
    if run.train.enable_fp8_training and run.train.computes_in == "float16":
        yield ConfigIssue(
            ("train", "enable_fp8_training"),
            "float16 does not have the range of FP8 values and their scales; write"
            " precision: bf16_mixed, or leave enable_fp8_training out",
            ("train.precision",),
        )


def _check_fp8_all_gather(run: RunConfig) -> Issues:
    train = run.train
    path = ("train", "enable_fp8_all_gather")
    if not train.enable_fp8_all_gather or not train.enable_fp8_training:
        return
    if train.data_parallel_mode != "fsdp2":
        yield ConfigIssue(
            path,
            f"data_parallel_mode: {train.data_parallel_mode} does not all-gather weights; write"
            " data_parallel_mode: fsdp2 or leave enable_fp8_all_gather out",
            ("train.data_parallel_mode",),
        )
    if train.enable_fsdp_offload:
        yield ConfigIssue(
            path,
            "quantizes weights on the GPU, and enable_fsdp_offload: true keeps them in host memory;"
            " leave one of the two out",
            ("train.enable_fsdp_offload",),
        )
    if train.enable_compile:
        yield ConfigIssue(
            path,
            "all-gathers a tensor subclass that torch.compile does not support here, and"
            " enable_compile is true; leave one of the two out",
            ("train.enable_compile",),
        )
    if run.lora.use_dora:
        yield ConfigIssue(
            path,
            "gives layers quantized weights, and lora.use_dora: true needs the norms of the"
            " unquantized rows; leave one of the two out",
            ("lora.use_dora",),
        )
    if train.fp8.recipe == "rowwise" and train.fp8.quantize_input_grad:
        yield ConfigIssue(
            path,
            "all-gathers weights that are quantized by rows, and gradients of activations need them"
            " quantized by columns; write fp8.recipe: tensorwise or blockwise, or"
            " fp8.quantize_input_grad: false",
            ("train.fp8.recipe", "train.fp8.quantize_input_grad"),
        )


def _check_fp8_compile(run: RunConfig) -> Issues:
    train = run.train
    if not (train.enable_fp8_training and train.enable_compile):
        return
    if train.fp8.recipe == "blockwise":
        return
    for name in SHARDING_AXES:
        if (size := getattr(train, name)) > 1:
            yield ConfigIssue(
                ("train", "enable_compile"),
                f"the ranks of {name} ({shown(size)}) all-reduce scales within a layer, which a"
                " compiled layer cannot; write fp8.recipe: blockwise, or leave"
                " enable_compile out",
                (f"train.{name}", "train.fp8.recipe"),
            )
            return


FP8_RULES = (
    _check_fp8_with_qlora,
    _check_fp8_precision,
    _check_fp8_all_gather,
    _check_fp8_compile,
)


def _check_group_size(run: RunConfig) -> Issues:
    lora = run.lora
    if not lora.enable_qlora or lora.quant_group_size is None:
        return
    allowed = sorted(set(GROUPS[lora.quant_format]))
    if lora.quant_group_size not in allowed:
        has = f"groups of {', '.join(map(str, allowed))}" if allowed else "one scale for each row"
        yield ConfigIssue(
            ("lora", "quant_group_size"),
            f"{lora.quant_group_size} columns cannot share a scale in {lora.quant_format}, which"
            f" has {has}; leave quant_group_size out",
            ("lora.quant_format",),
        )


def _check_aqn(run: RunConfig) -> Issues:
    if run.lora.enable_aqn and run.lora.use_dora:
        yield ConfigIssue(
            ("lora", "enable_aqn"),
            "its noise would change the norms of rows, which use_dora: true needs, in each step;"
            " leave one of the two out",
            ("lora.use_dora",),
        )


QLORA_RULES = (_check_group_size, _check_aqn)
