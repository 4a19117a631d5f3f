"""Combinations of settings of memory and determinism that cannot be honoured."""

from penstock.config.data_rules import Faults
from penstock.config.faults import Fault
from penstock.config.run import RunConfig

BLOCKING = "CUDA_LAUNCH_BLOCKING"


def _recomputing_is_on(run: RunConfig) -> Faults:
    train = run.train
    for name in ("recompute_modules", "moe_checkpoint_method"):
        if getattr(train, name) is not None and not train.enable_gradient_checkpointing:
            yield Fault(
                ("train", name),
                "nothing is recomputed with enable_gradient_checkpointing: false;"
                f" set it to true or leave {name} out",
                ("train.enable_gradient_checkpointing",),
            )
    modules = train.recompute_modules
    if train.moe_checkpoint_method and modules is not None and "mlp" not in modules:
        yield Fault(
            ("train", "moe_checkpoint_method"),
            "says how experts are recomputed, and recompute_modules leaves them out; write"
            f" recompute_modules: [{', '.join([*modules, 'mlp'])}], or leave one of the two out",
            ("train.recompute_modules",),
        )


def _offloading_is_on(run: RunConfig) -> Faults:
    train = run.train
    if train.activation_gpu_limit and not train.enable_activation_offload:
        yield Fault(
            ("train", "activation_gpu_limit"),
            "all activations stay on the GPU with enable_activation_offload: false; set it to true"
            " or leave activation_gpu_limit out",
            ("train.enable_activation_offload",),
        )


def _kernels_may_wait(run: RunConfig) -> Faults:
    train = run.train
    if train.allow_cuda_launch_blocking:
        return
    if train.enable_full_determinism:
        yield Fault(
            ("train", "enable_full_determinism"),
            f"sets {BLOCKING}=1, which makes every kernel wait; write"
            " allow_cuda_launch_blocking: true, or leave enable_full_determinism out",
            ("train.allow_cuda_launch_blocking",),
        )
    if run.launch.env.get(BLOCKING, "0") != "0":
        yield Fault(
            ("launch", "env"),
            f"sets {BLOCKING}, which makes every kernel wait; write"
            f" train.allow_cuda_launch_blocking: true, or leave {BLOCKING} out",
            ("train.allow_cuda_launch_blocking",),
        )


MEMORY_RULES = (_recomputing_is_on, _offloading_is_on, _kernels_may_wait)
