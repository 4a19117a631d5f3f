"""Invalid combinations of layout, memory and quantization settings that a declaration cannot say.

Whether sizes fit the world size and the model is checked where these are known.
"""

from penstock.config.loading.fault import ConfigIssue, Issues, shown
from penstock.config.schema.quantization import GROUPS
from penstock.config.schema.run import RunConfig

# Expert-parallel sizes that DeepEP supports over NVLink.
DEEPEP_SIZES = (2, 4, 8)

# Axes whose ranks hold shards of the operands of a matmul and reduce scales.
SHARDING_AXES = ("tensor_parallel_size", "ulysses_parallel_size", "ringattn_parallel_size")

BLOCKING = "CUDA_LAUNCH_BLOCKING"


def _check_sharding(run: RunConfig) -> Issues:
    train, schedule = run.train, run.train.split_backward_schedule
    stage, reshard = train.zero_stage, train.reshard_after_forward
    if stage is not None and reshard is not None and reshard != (stage == 3):
        yield ConfigIssue(
            ("train", "zero_stage"),
            f"stage {stage} {'frees' if stage == 3 else 'keeps'} weights after the forward pass,"
            f" and reshard_after_forward is {shown(reshard)}; write zero_stage:"
            f" {3 if reshard else 2}, or leave reshard_after_forward out",
            ("train.reshard_after_forward",),
        )
    if schedule and train.enable_reentrant and train.enable_gradient_checkpointing:
        yield ConfigIssue(
            ("train", "enable_reentrant"),
            f"pipeline_parallel_schedule: {schedule} computes the gradients of weights later, which"
            " reentrant activation checkpointing does not support; write enable_reentrant: false",
            ("train.pipeline_parallel_schedule", "train.pipeline_parallel_size"),
        )


def _check_deepep(run: RunConfig) -> Issues:
    size = run.train.expert_parallel_size
    if run.model.ep_dispatch == "deepep" and size not in DEEPEP_SIZES:
        nearest = min(DEEPEP_SIZES, key=lambda candidate: abs(candidate - size))
        yield ConfigIssue(
            ("model", "ep_dispatch"),
            "deepep needs 2, 4 or 8 ranks on one node, and"
            f" expert_parallel_size is {size}; write train.expert_parallel_size: {nearest}, or"
            " ep_dispatch: alltoall",
            ("train.expert_parallel_size",),
        )


def _check_activation_checkpointing(run: RunConfig) -> Issues:
    train = run.train
    modules = train.recompute_modules
    if modules and {"self_attn", "core_attn"} <= set(modules):
        yield ConfigIssue(
            ("train", "recompute_modules"),
            "has core_attn, which is part of self_attn and recomputed with it;"
            " leave out one of the two",
        )
    if modules and "vision" in modules and run.data.encode_images:
        yield ConfigIssue(
            ("train", "recompute_modules"),
            "has vision, and with encode_images: true no step computes images; leave vision out",
            ("data.encode_images",),
        )
    if train.moe_checkpoint_method and modules is not None and "mlp" not in modules:
        yield ConfigIssue(
            ("train", "moe_checkpoint_method"),
            "is for the recomputation of experts, which recompute_modules leaves out; write"
            f" recompute_modules: [{', '.join([*modules, 'mlp'])}], or leave one of the two out",
            ("train.recompute_modules",),
        )


def _check_debugging(run: RunConfig) -> Issues:
    train = run.train
    if run.launch.env.get(BLOCKING, "0") != "0" and not train.allow_cuda_launch_blocking:
        yield ConfigIssue(
            ("launch", "env"),
            f"sets {BLOCKING}, which makes every kernel launch synchronous; write"
            f" train.allow_cuda_launch_blocking: true, or leave {BLOCKING} out",
            ("train.allow_cuda_launch_blocking",),
        )
    first, end = train.profile_start_step, train.profile_end_step
    if train.enable_profiling and end <= first:
        yield ConfigIssue(
            ("train", "profile_end_step"),
            f"the profiler would stop after {end} steps and start after {first}; write"
            f" profile_end_step: {first + 1} to profile one step",
            ("train.profile_start_step",),
        )


def _check_fp8_compile(run: RunConfig) -> Issues:
    train = run.train
    name = next((axis for axis in SHARDING_AXES if getattr(train, axis) > 1), None)
    is_compiled = train.enable_fp8_training and train.enable_compile
    if name and is_compiled and train.fp8.recipe != "blockwise":
        yield ConfigIssue(
            ("train", "enable_compile"),
            f"the ranks of {name} ({getattr(train, name)}) all-reduce scales within a layer, which"
            " a compiled layer cannot; write fp8.recipe: blockwise, or leave enable_compile out",
            (f"train.{name}", "train.fp8.recipe"),
        )


def _check_group_size(run: RunConfig) -> Issues:
    lora, size = run.lora, run.lora.quant_group_size
    allowed = sorted(set(GROUPS[lora.quant_format]))
    if lora.enable_qlora and size is not None and size not in allowed:
        has = f"groups of {', '.join(map(str, allowed))}" if allowed else "one scale for each row"
        yield ConfigIssue(
            ("lora", "quant_group_size"),
            f"{size} columns cannot share a scale in {lora.quant_format}, which"
            f" has {has}; leave quant_group_size out",
            ("lora.quant_format",),
        )


LAYOUT_RULES = (
    _check_sharding,
    _check_deepep,
    _check_activation_checkpointing,
    _check_debugging,
    _check_fp8_compile,
    _check_group_size,
)
