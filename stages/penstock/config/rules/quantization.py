"""Invalid combinations of FP8 and QLoRA settings."""

from penstock.config.loading.fault import ConfigIssue, Steps, shown
from penstock.config.rules.data import Issues
from penstock.config.schema.fp8 import Fp8Config
from penstock.config.schema.quantization import GROUPS
from penstock.config.schema.run import RunConfig

SHARDING_AXES = ("tensor_parallel_size", "ulysses_parallel_size", "ringattn_parallel_size")
"""Axes whose ranks hold shards of the operands of a matmul and reduce scales."""


def _check_fp8_enabled(run: RunConfig) -> Issues:
    train = run.train
    if train.enable_fp8_training:
        return
    options: list[Steps] = [("enable_fp8_all_gather",)] if train.enable_fp8_all_gather else []
    options += [("fp8", name) for name in Fp8Config.model_fields if train.fp8.is_non_default(name)]
    for path in options:
        yield ConfigIssue(
            ("train", *path),
            "there is no FP8 training with enable_fp8_training: false; write"
            f" enable_fp8_training: true or leave {path[-1]} out",
            ("train.enable_fp8_training",),
        )


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


def _check_hadamard(run: RunConfig) -> Issues:
    fp8 = run.train.fp8
    if not run.train.enable_fp8_training or fp8.hadamard:
        return
    if fp8.is_non_default("hadamard_block_size"):
        yield ConfigIssue(
            ("train", "fp8", "hadamard_block_size"),
            "is not used with hadamard: false; write hadamard: true or leave"
            " hadamard_block_size out",
            ("train.fp8.hadamard",),
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
    _check_fp8_enabled,
    _check_fp8_with_qlora,
    _check_fp8_precision,
    _check_hadamard,
    _check_fp8_all_gather,
    _check_fp8_compile,
)


QLORA_FIELDS = ("quant_format", "quant_group_size", "exclude_modules", "enable_aqn")
"""Settings that have an effect only with QLoRA."""


def _check_qlora_enabled(run: RunConfig) -> Issues:
    lora = run.lora
    if not lora.enable_qlora:
        for name in QLORA_FIELDS:
            if lora.is_non_default(name):
                yield ConfigIssue(
                    ("lora", name),
                    "nothing is quantized with enable_qlora: false;"
                    f" write enable_qlora: true or leave {name} out",
                    ("lora.enable_qlora",),
                )
    if lora.is_non_default("aqn_alpha") and not lora.enable_aqn:
        yield ConfigIssue(
            ("lora", "aqn_alpha"),
            "no noise is added with enable_aqn: false; write enable_aqn: true or leave aqn_alpha"
            " out",
            ("lora.enable_aqn",),
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


QLORA_RULES = (_check_qlora_enabled, _check_group_size, _check_aqn)
