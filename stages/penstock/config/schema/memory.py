"""What a step keeps, recomputes, offloads or compiles, and where weights come up."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Keyed, KeyedUnlessDefault, Unkeyed

Precision = Literal["fp32", "bf16_mixed", "bf16", "fp16_mixed"]


class MemoryConfig(ConfigSection):
    """Memory, precision and speed of a training step."""

    enable_mixed_precision: Keyed[bool] = True
    """Compute in bfloat16 while weights and optimizer states stay in float32. `precision`, where it
    is written, decides instead; false does not go with its mixed ones."""

    precision: KeyedUnlessDefault[Precision | None] = None
    """What is computed in, and what weights are kept in: `fp32`; `bf16_mixed` computes in bfloat16
    and keeps float32; `bf16` keeps bfloat16 too; `fp16_mixed` computes in float16, with a loss that
    is scaled up and down as needed, and keeps float32. Unset: `bf16_mixed`, or `fp32` with
    `enable_mixed_precision: false`."""

    master_weights: KeyedUnlessDefault[bool | None] = None
    """Keep weights in float32 while computing in bfloat16. Unset: as `precision` says. With true,
    `bf16` is `bf16_mixed`; with false, `bf16_mixed` is `bf16`."""

    stochastic_rounding: KeyedUnlessDefault[bool] = False
    """Round what the optimizer keeps in bfloat16, weights and second moments, up or down at random
    such that the mean is right: small steps are not lost. What is drawn depends on `seed`, the step
    and the place in the weights, and never on the layout. For `adamw`, `anyprecision_adamw` and
    `muon`."""

    grad_accum_dtype: KeyedUnlessDefault[Literal["fp32", "bf16"] | None] = None
    """Precision in which gradients of several micro-batches are added up. Unset: `fp32`. Under
    `fsdp2` that is `fsdp_reduce_dtype`, and the two must agree."""

    loss_scale_init: KeyedUnlessDefault[float] = Field(default=65536.0, gt=0)
    """`fp16_mixed`: what the loss is multiplied by at first. It is halved when gradients overflow,
    and the step is left out; it doubles after 2,000 steps without that."""

    enable_gradient_checkpointing: Unkeyed[bool] = True
    """Recompute activations in the backward pass instead of keeping them."""

    enable_reentrant: Unkeyed[bool] = False
    """Use PyTorch's reentrant form of recomputation."""

    recompute_modules: Unkeyed[list[Literal["self_attn", "core_attn", "mlp"]] | None] = Field(
        default=None, min_length=1
    )
    """Recompute only these parts of each layer: `self_attn`, `mlp`, or `core_attn`, which is
    attention without its projections (softmax(q k^T) v). Unset: whole layers."""

    moe_checkpoint_method: Unkeyed[Literal["moe_act"] | None] = None
    """How a mixture of experts is recomputed. `moe_act` keeps the rows that were sent to experts
    and what came back, and recomputes only the gate and up products and the activation (and the
    shared experts): no token travels twice, and memory grows with the experts of a token. Unset:
    all of it, with its communication."""

    enable_full_shard: Unkeyed[bool] = True
    """`fsdp2`: free gathered weights after the forward pass (ZeRO-3); false keeps them until the
    backward pass has used them, and shards only gradients and states (ZeRO-2). `zero_stage`, where
    it is written, decides instead; false does not go with stage 3."""

    enable_fsdp_offload: Unkeyed[bool] = False
    """`fsdp2`: keep sharded weights, gradients and optimizer states in host memory, and let the CPU
    step the optimizer. Slow, and the last resort when a model does not fit."""

    optimizer_offload: Unkeyed[Literal["none", "cpu"]] = "none"
    """`cpu`: the optimizer's states lie in host memory, and the CPU steps the optimizer. Weights
    and gradients stay on the GPU, and travel once a step; `enable_fsdp_offload` moves these too."""

    fuse_optimizer_step: Unkeyed[bool] = False
    """Step each weight in the backward pass, as soon as its gradient is there: gradients are never
    there all at once. For steps of one micro-batch with `max_grad_norm: 0`, under `none` or
    `fsdp2`."""

    enable_forward_prefetch: Unkeyed[bool] = True
    """`fsdp2`: gather the next unit's weights during the forward pass of this one."""

    enable_activation_offload: Unkeyed[bool] = False
    """Move what layers keep for the backward pass to host memory, beside the computation, and back
    before it is wanted. With recomputation that is little more than the input of each layer."""

    activation_gpu_limit: Unkeyed[float] = Field(default=0.0, ge=0)
    """Gigabytes of activations that stay on the GPU when offloading: the newest, which are wanted
    first. 0 moves all, but for those of two layers on their way."""

    enable_compile: Unkeyed[bool] = False
    """Compile what layers compute with `torch.compile`, when training starts: one program for all
    layers of a kind, whatever the lengths of rows and documents, and whatever a step drops or
    routes where. Where experts are on several ranks, a layer is a few programs between which tokens
    travel; `moe_implementation: eager` and `moe_checkpoint_method: moe_act` leave experts out.
    Needs a C++ compiler on CPUs, Triton on GPUs."""

    init_device: Unkeyed[Literal["cpu", "cuda", "meta", "npu"] | None] = None
    """Where weights are created before they are loaded. Unset: `meta` under `fsdp2`, which accepts
    nothing else; otherwise the training device. `npu` is refused: nothing is computed there."""

    load_weights_mode: Unkeyed[Literal["broadcast", "all_ranks"]] = "broadcast"
    """`broadcast`: one rank reads the weights and sends them on; `all_ranks`: each reads them."""

    enable_full_determinism: Unkeyed[bool] = False
    """Use only kernels that give the same bits each time, with `CUDA_LAUNCH_BLOCKING=1`; what has
    no such kernel fails. Slow. Needs `allow_cuda_launch_blocking`."""

    allow_cuda_launch_blocking: Unkeyed[bool] = False
    """Permit `CUDA_LAUNCH_BLOCKING=1`, which makes every kernel wait. Without this a run that finds
    it in its environment is refused."""

    empty_cache_steps: Unkeyed[int] = Field(default=500, ge=0)
    """Return cached GPU memory every so many steps; 0 never."""

    gc_steps: Unkeyed[int] = Field(default=500, ge=0)
    """Collect Python's garbage every so many steps, and only then; 0 leaves it to Python."""

    @property
    def resolved_precision(self) -> Precision:
        """`precision`, `enable_mixed_precision` and `master_weights` in one: `precision` decides
        where it is written, and `master_weights` between `bf16_mixed` and `bf16`."""
        found = self.precision or ("bf16_mixed" if self.enable_mixed_precision else "fp32")
        if self.master_weights is not None and found in ("bf16", "bf16_mixed"):
            return "bf16_mixed" if self.master_weights else "bf16"
        return found

    @property
    def computes_in(self) -> Literal["float32", "bfloat16", "float16"]:
        """What layers compute in, as torch calls it."""
        return COMPUTES_IN[self.resolved_precision]

    @property
    def keeps_in(self) -> Literal["float32", "bfloat16"]:
        """What trained weights are kept in, as torch calls it."""
        return "bfloat16" if self.resolved_precision == "bf16" else "float32"


COMPUTES_IN: Mapping[Precision, Literal["float32", "bfloat16", "float16"]] = {
    "fp32": "float32",
    "bf16_mixed": "bfloat16",
    "bf16": "bfloat16",
    "fp16_mixed": "float16",
}
