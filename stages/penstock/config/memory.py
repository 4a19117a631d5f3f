"""What a step keeps, recomputes, offloads or compiles, and where weights come up."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.availability import Later
from penstock.config.section import Section


class MemoryConfig(Section):
    """Memory, precision and speed of a training step."""

    enable_mixed_precision: bool = True
    """Compute in bfloat16 while weights and optimizer states stay in float32."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them."""

    enable_reentrant: bool = False
    """Use PyTorch's reentrant form of recomputation."""

    recompute_modules: list[Literal["self_attn", "mlp"]] | None = Field(default=None, min_length=1)
    """Recompute only these parts of each layer: `[self_attn]`, `[mlp]` or both. Unset: whole
    layers."""

    moe_checkpoint_method: Literal["moe_act"] | None = None
    """How a mixture of experts is recomputed. `moe_act` keeps the rows that were sent to experts
    and what came back, and recomputes only the gate and up products and the activation (and the
    shared experts): no token travels twice, and memory grows with the experts of a token. Unset:
    all of it, with its communication."""

    enable_full_shard: bool = True
    """`fsdp2`: free gathered weights after the forward pass (ZeRO-3); false keeps them until the
    backward pass has used them, and shards only gradients and states (ZeRO-2)."""

    enable_fsdp_offload: bool = False
    """`fsdp2`: keep sharded weights, gradients and optimizer states in host memory, and let the CPU
    step the optimizer. Slow, and the last resort when a model does not fit."""

    enable_forward_prefetch: bool = True
    """`fsdp2`: gather the next unit's weights during the forward pass of this one."""

    enable_activation_offload: bool = False
    """Move what layers keep for the backward pass to host memory, beside the computation, and back
    before it is wanted. With recomputation that is little more than the input of each layer."""

    activation_gpu_limit: float = Field(default=0.0, ge=0)
    """Gigabytes of activations that stay on the GPU when offloading: the newest, which are wanted
    first. 0 moves all, but for those of two layers on their way."""

    enable_compile: bool = False
    """Compile what layers compute with `torch.compile`, when training starts: one program for all
    layers of a kind, whatever the lengths of rows and documents. Mixtures of experts keep their
    kernels. Needs a C++ compiler on CPUs, Triton on GPUs."""

    init_device: Annotated[
        Literal["cpu", "cuda", "meta", "npu"] | None, Later(allowed=("cpu", "cuda", "meta"))
    ] = None
    """Where weights are created before they are loaded. Unset: `meta` under `fsdp2`, which accepts
    nothing else; otherwise the training device."""

    load_weights_mode: Literal["broadcast", "all_ranks"] = "broadcast"
    """`broadcast`: one rank reads the weights and sends them on; `all_ranks`: each reads them."""

    enable_full_determinism: bool = False
    """Use only kernels that give the same bits each time, with `CUDA_LAUNCH_BLOCKING=1`; what has
    no such kernel fails. Slow. Needs `allow_cuda_launch_blocking`."""

    allow_cuda_launch_blocking: bool = False
    """Permit `CUDA_LAUNCH_BLOCKING=1`, which makes every kernel wait. Without this a run that finds
    it in its environment is refused."""

    empty_cache_steps: int = Field(default=500, ge=0)
    """Return cached GPU memory every so many steps; 0 never."""

    gc_steps: int = Field(default=500, ge=0)
    """Collect Python's garbage every so many steps, and only then; 0 leaves it to Python."""
