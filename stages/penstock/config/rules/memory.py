"""Combinations of settings of memory, determinism and profiles that cannot be honoured."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Faults
from penstock.config.schema.run import RunConfig

BLOCKING = "CUDA_LAUNCH_BLOCKING"


def _recomputing_is_on(run: RunConfig) -> Faults:
    train = run.train
    for name in ("recompute_modules", "moe_checkpoint_method"):
        if getattr(train, name) is not None and not train.enable_gradient_checkpointing:
            yield ConfigIssue(
                ("train", name),
                "nothing is recomputed with enable_gradient_checkpointing: false;"
                f" set it to true or leave {name} out",
                ("train.enable_gradient_checkpointing",),
            )
    modules = train.recompute_modules
    if modules and {"self_attn", "core_attn"} <= set(modules):
        yield ConfigIssue(
            ("train", "recompute_modules"),
            "names core_attn, which is a part of self_attn and recomputed with it;"
            " leave out one of the two",
        )
    if train.moe_checkpoint_method and modules is not None and "mlp" not in modules:
        yield ConfigIssue(
            ("train", "moe_checkpoint_method"),
            "says how experts are recomputed, and recompute_modules leaves them out; write"
            f" recompute_modules: [{', '.join([*modules, 'mlp'])}], or leave one of the two out",
            ("train.recompute_modules",),
        )


def _offloading_is_on(run: RunConfig) -> Faults:
    train = run.train
    if train.activation_gpu_limit and not train.enable_activation_offload:
        yield ConfigIssue(
            ("train", "activation_gpu_limit"),
            "all activations stay on the GPU with enable_activation_offload: false; set it to true"
            " or leave activation_gpu_limit out",
            ("train.enable_activation_offload",),
        )


def _a_gradient_can_be_used_at_once(run: RunConfig) -> Faults:
    train = run.train
    if not train.fuse_optimizer_step:
        return
    hindrances = {
        "max_grad_norm": (train.max_grad_norm > 0, "gradients are clipped by the norm of all", "0"),
        "gradient_accumulation_steps": (
            train.gradient_accumulation_steps > 1,
            "gradients of several micro-batches are added up first",
            "1",
        ),
        "data_parallel_mode": (
            train.data_parallel_mode == "ddp",
            "ddp sums gradients over ranks many at a time",
            "fsdp2",
        ),
        "tensor_parallel_size": (
            train.tensor_parallel_size > 1,
            "gradients are sums over ranks that are made last",
            "1",
        ),
        "pipeline_parallel_size": (
            train.pipeline_parallel_size > 1,
            "stages add gradients of several micro-batches up first",
            "1",
        ),
        "precision": (
            train.computes_in == "float16",
            "whether they overflow in float16 is known when all are there",
            "bf16_mixed",
        ),
        "optimizer": (
            train.optimizer in ("muon", "novograd"),
            f"{train.optimizer} steps all matrices together",
            "adamw",
        ),
        "optimizer_offload": (
            train.optimizer_offload != "none",
            "gradients are brought to the host together",
            "none",
        ),
        "log_grad_norm": (
            train.log_grad_norm == "layers",
            "norms of layers are told of gradients that are all there",
            "true",
        ),
    }
    for name, (hinders, why, instead) in hindrances.items():
        if hinders:
            yield ConfigIssue(
                ("train", "fuse_optimizer_step"),
                f"uses each gradient as soon as it is there, and {why}; write {name}: {instead},"
                " or leave fuse_optimizer_step out",
                (f"train.{name}",),
            )
            return


def _the_optimizer_is_moved_once(run: RunConfig) -> Faults:
    train, lora = run.train, run.lora
    if train.optimizer_offload == "none":
        return
    if train.enable_fsdp_offload:
        yield ConfigIssue(
            ("train", "optimizer_offload"),
            "enable_fsdp_offload keeps weights, gradients and states in host memory already; leave"
            " one of the two out",
            ("train.enable_fsdp_offload",),
        )
    if lora.reset_optimizer_on_merge:
        yield ConfigIssue(
            ("train", "optimizer_offload"),
            "keeps the states of adapters where reset_optimizer_on_merge does not reach them; leave"
            " one of the two out",
            ("lora.reset_optimizer_on_merge",),
        )


def _kernels_may_wait(run: RunConfig) -> Faults:
    train = run.train
    if train.allow_cuda_launch_blocking:
        return
    if train.enable_full_determinism:
        yield ConfigIssue(
            ("train", "enable_full_determinism"),
            f"sets {BLOCKING}=1, which makes every kernel wait; write"
            " allow_cuda_launch_blocking: true, or leave enable_full_determinism out",
            ("train.allow_cuda_launch_blocking",),
        )
    if run.launch.env.get(BLOCKING, "0") != "0":
        yield ConfigIssue(
            ("launch", "env"),
            f"sets {BLOCKING}, which makes every kernel wait; write"
            f" train.allow_cuda_launch_blocking: true, or leave {BLOCKING} out",
            ("train.allow_cuda_launch_blocking",),
        )


def _weights_begin_where_something_is_computed(run: RunConfig) -> Faults:
    if run.train.init_device == "npu" and run.train.data_parallel_mode != "fsdp2":
        yield ConfigIssue(
            ("train", "init_device"),
            "training runs on CPUs and CUDA devices, and on no npu; write cpu, or leave it out",
        )


def _a_profile_has_steps(run: RunConfig) -> Faults:
    first, end = run.train.profile_start_step, run.train.profile_end_step
    if run.train.enable_profiling and end <= first:
        yield ConfigIssue(
            ("train", "profile_end_step"),
            f"recording would end when {end} steps are done, and begin when {first} are; write"
            f" profile_end_step: {first + 1} to record the next one",
            ("train.profile_start_step",),
        )


MEMORY_RULES = (
    _weights_begin_where_something_is_computed,
    _recomputing_is_on,
    _offloading_is_on,
    _the_optimizer_is_moved_once,
    _a_gradient_can_be_used_at_once,
    _kernels_may_wait,
    _a_profile_has_steps,
)
