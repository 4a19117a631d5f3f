"""Combinations of settings of products of 8 bits that cannot be honoured."""

from penstock.config.loading.fault import ConfigIssue, Steps, shown
from penstock.config.rules.data import Faults
from penstock.config.schema.fp8 import Fp8Config
from penstock.config.schema.quantization import GROUPS
from penstock.config.schema.run import RunConfig

SPLITTING = ("tensor_parallel_size", "ulysses_parallel_size", "ringattn_parallel_size")
"""Axes along which ranks hold parts of a layer's matrices, and agree on scales."""


def _products_have_8_bits(run: RunConfig) -> Faults:
    train = run.train
    if train.enable_fp8_training:
        return
    wished: list[Steps] = [("enable_fp8_all_gather",)] if train.enable_fp8_all_gather else []
    wished += [("fp8", name) for name in Fp8Config.model_fields if train.fp8.asks_for(name)]
    for path in wished:
        yield ConfigIssue(
            ("train", *path),
            "nothing is rounded to 8 bits with enable_fp8_training: false; write"
            f" enable_fp8_training: true or leave {path[-1]} out",
            ("train.enable_fp8_training",),
        )


def _base_weights_have_not_fewer(run: RunConfig) -> Faults:
    if run.train.enable_fp8_training and run.lora.enable_qlora:
        yield ConfigIssue(
            ("train", "enable_fp8_training"),
            "lora.enable_qlora: true keeps base weights in fewer bits and multiplies with them in"
            " the run's precision; leave one of the two out",
            ("lora.enable_qlora",),
        )


def _scales_are_powers_that_the_precision_has(run: RunConfig) -> Faults:
    if run.train.enable_fp8_training and run.train.computes_in == "float16":
        yield ConfigIssue(
            ("train", "enable_fp8_training"),
            "float16 has not the range of numbers of 8 bits and their scales; write"
            " precision: bf16_mixed, or leave enable_fp8_training out",
            ("train.precision",),
        )


def _turning_is_on(run: RunConfig) -> Faults:
    fp8 = run.train.fp8
    if not run.train.enable_fp8_training or fp8.hadamard:
        return
    if fp8.asks_for("hadamard_block_size"):
        yield ConfigIssue(
            ("train", "fp8", "hadamard_block_size"),
            "nothing is turned with hadamard: false; write hadamard: true or leave"
            " hadamard_block_size out",
            ("train.fp8.hadamard",),
        )


def _weights_can_be_gathered(run: RunConfig) -> Faults:
    train = run.train
    path = ("train", "enable_fp8_all_gather")
    if not train.enable_fp8_all_gather or not train.enable_fp8_training:
        return
    if train.data_parallel_mode != "fsdp2":
        yield ConfigIssue(
            path,
            f"data_parallel_mode: {train.data_parallel_mode} gathers no weights; write"
            " data_parallel_mode: fsdp2 or leave enable_fp8_all_gather out",
            ("train.data_parallel_mode",),
        )
    if train.enable_fsdp_offload:
        yield ConfigIssue(
            path,
            "rounds weights where they lie, and enable_fsdp_offload: true keeps them in host"
            " memory; leave one of the two out",
            ("train.enable_fsdp_offload",),
        )
    if train.enable_compile:
        yield ConfigIssue(
            path,
            "gives layers weights that no compiler here knows, and enable_compile is true; leave"
            " one of the two out",
            ("train.enable_compile",),
        )
    if run.lora.use_dora:
        yield ConfigIssue(
            path,
            "gives layers rounded weights, and with lora.use_dora: true the norms of their rows are"
            " those of the weights as they are; leave one of the two out",
            ("lora.use_dora",),
        )
    if train.fp8.recipe == "rowwise" and train.fp8.quantize_input_grad:
        yield ConfigIssue(
            path,
            "gathers weights that are rounded by rows, and gradients of activations want them"
            " rounded by columns; write fp8.recipe: tensorwise or blockwise, or"
            " fp8.quantize_input_grad: false",
            ("train.fp8.recipe", "train.fp8.quantize_input_grad"),
        )


def _compiled_layers_speak_to_nobody(run: RunConfig) -> Faults:
    train = run.train
    if not (train.enable_fp8_training and train.enable_compile):
        return
    if train.fp8.recipe == "blockwise":
        return
    for name in SPLITTING:
        if (size := getattr(train, name)) > 1:
            yield ConfigIssue(
                ("train", "enable_compile"),
                f"the ranks of {name} ({shown(size)}) agree on scales within a layer, and a"
                " compiled one speaks to nobody; write fp8.recipe: blockwise, or leave"
                " enable_compile out",
                (f"train.{name}", "train.fp8.recipe"),
            )
            return


FP8_RULES = (
    _products_have_8_bits,
    _base_weights_have_not_fewer,
    _scales_are_powers_that_the_precision_has,
    _turning_is_on,
    _weights_can_be_gathered,
    _compiled_layers_speak_to_nobody,
)


OF_QUANTIZED = ("quant_format", "quant_group_size", "exclude_modules", "enable_aqn")
"""Settings that mean something only where base weights are quantized."""


def _base_is_quantized(run: RunConfig) -> Faults:
    lora = run.lora
    if not lora.enable_qlora:
        for name in OF_QUANTIZED:
            if lora.asks_for(name):
                yield ConfigIssue(
                    ("lora", name),
                    "nothing is quantized with enable_qlora: false;"
                    f" write enable_qlora: true or leave {name} out",
                    ("lora.enable_qlora",),
                )
    if lora.asks_for("aqn_alpha") and not lora.enable_aqn:
        yield ConfigIssue(
            ("lora", "aqn_alpha"),
            "no noise is added with enable_aqn: false; write enable_aqn: true or leave aqn_alpha"
            " out",
            ("lora.enable_aqn",),
        )


def _groups_are_the_formats(run: RunConfig) -> Faults:
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


def _noise_leaves_norms(run: RunConfig) -> Faults:
    if run.lora.enable_aqn and run.lora.use_dora:
        yield ConfigIssue(
            ("lora", "enable_aqn"),
            "use_dora: true gives weights norms, which noise would change from step to step; leave"
            " one of the two out",
            ("lora.use_dora",),
        )


QLORA_RULES = (_base_is_quantized, _groups_are_the_formats, _noise_leaves_norms)
