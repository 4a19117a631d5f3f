"""Invalid combinations of memory, determinism and profiler settings."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Issues
from penstock.config.schema.run import RunConfig

BLOCKING = "CUDA_LAUNCH_BLOCKING"


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


def _check_optimizer_in_backward(run: RunConfig) -> Issues:
    train = run.train
    if not train.fuse_optimizer_step:
        return
    conflicts = {
        "max_grad_norm": (
            train.max_grad_norm > 0,
            "gradients are clipped by their global norm",
            "0",
        ),
        "gradient_accumulation_steps": (
            train.gradient_accumulation_steps > 1,
            "gradients of several micro-batches are accumulated first",
            "1",
        ),
        "data_parallel_mode": (
            train.data_parallel_mode == "ddp",
            "ddp all-reduces gradients in buckets",
            "fsdp2",
        ),
        "tensor_parallel_size": (
            train.tensor_parallel_size > 1,
            "gradients are reduced over ranks at the end",
            "1",
        ),
        "pipeline_parallel_size": (
            train.pipeline_parallel_size > 1,
            "pipeline stages accumulate gradients of several micro-batches first",
            "1",
        ),
        "precision": (
            train.computes_in == "float16",
            "float16 overflow is known only when all gradients are complete",
            "bf16_mixed",
        ),
        "optimizer": (
            train.optimizer in ("muon", "novograd"),
            f"{train.optimizer} updates all matrices together",
            "adamw",
        ),
        "optimizer_offload": (
            train.optimizer_offload != "none",
            "gradients are copied to the host together",
            "none",
        ),
        "log_grad_norm": (
            train.log_grad_norm == "layers",
            "norms of layers need all gradients at once",
            "true",
        ),
    }
    for name, (is_set, why, instead) in conflicts.items():
        if is_set:
            yield ConfigIssue(
                ("train", "fuse_optimizer_step"),
                f"uses each gradient as soon as it is complete, and {why}; write {name}: {instead},"
                " or leave fuse_optimizer_step out",
                (f"train.{name}",),
            )
            return


def _check_optimizer_offload(run: RunConfig) -> Issues:
    train, lora = run.train, run.lora
    if train.optimizer_offload == "none":
        return
    if train.enable_fsdp_offload:
        yield ConfigIssue(
            ("train", "optimizer_offload"),
            "enable_fsdp_offload already offloads weights, gradients and optimizer states; leave"
            " one of the two out",
            ("train.enable_fsdp_offload",),
        )
    if lora.reset_optimizer_on_merge:
        yield ConfigIssue(
            ("train", "optimizer_offload"),
            "offloads optimizer states, which reset_optimizer_on_merge cannot reset there; leave"
            " one of the two out",
            ("lora.reset_optimizer_on_merge",),
        )


def _check_cuda_launch_blocking(run: RunConfig) -> Issues:
    train = run.train
    if train.allow_cuda_launch_blocking:
        return
    if train.enable_full_determinism:
        yield ConfigIssue(
            ("train", "enable_full_determinism"),
            f"sets {BLOCKING}=1, which makes every kernel launch synchronous; write"
            " allow_cuda_launch_blocking: true, or leave enable_full_determinism out",
            ("train.allow_cuda_launch_blocking",),
        )
    if run.launch.env.get(BLOCKING, "0") != "0":
        yield ConfigIssue(
            ("launch", "env"),
            f"sets {BLOCKING}, which makes every kernel launch synchronous; write"
            f" train.allow_cuda_launch_blocking: true, or leave {BLOCKING} out",
            ("train.allow_cuda_launch_blocking",),
        )


def _check_init_device(run: RunConfig) -> Issues:
    if run.train.init_device == "npu" and run.train.data_parallel_mode != "fsdp2":
        yield ConfigIssue(
            ("train", "init_device"),
            "training runs on CPUs and CUDA devices, not on npu; write cpu, or leave it out",
        )


def _check_profile_steps(run: RunConfig) -> Issues:
    first, end = run.train.profile_start_step, run.train.profile_end_step
    if run.train.enable_profiling and end <= first:
        yield ConfigIssue(
            ("train", "profile_end_step"),
            f"the profiler would stop after {end} steps and start after {first}; write"
            f" profile_end_step: {first + 1} to profile one step",
            ("train.profile_start_step",),
        )


MEMORY_RULES = (
    _check_init_device,
    _check_activation_checkpointing,
    _check_optimizer_offload,
    _check_optimizer_in_backward,
    _check_cuda_launch_blocking,
    _check_profile_steps,
)
