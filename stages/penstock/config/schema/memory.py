"""Precision, activation checkpointing, offload, compilation and weight initialization."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import CacheKey, KeyedUnlessDefault, Unkeyed
from penstock.config.schema.effect import OWN_EXPERTS, TRAINS, NativeOnly, NotWith, OnlyWith
from penstock.config.schema.parallelism import FSDP2
from penstock.config.schema.served import Served

Precision = Literal["fp32", "bf16_mixed", "bf16", "fp16_mixed"]


FP16 = OnlyWith(
    "train.computes_in",
    ("float16",),
    words="precision: fp16_mixed",
    why="loss scaling is for float16 only, and this run computes in {value}",
)
RECOMPUTED = OnlyWith(
    "train.enable_gradient_checkpointing", why="nothing is recomputed with {name}: {value}"
)
OFFLOADED = OnlyWith(
    "train.enable_activation_offload", why="all activations stay on the GPU with {name}: {value}"
)

# Optimizers with stochastic rounding.
STOCHASTIC = ("adamw", "anyprecision_adamw", "muon", "novograd")

RESULT_DTYPES = ("train.precision", "train.optimizer", "train.optimizer_dtype")


def _step_in_backward(
    setting: str, why: str, instead: str, *, reads: tuple[str, ...] = (), **matched: tuple[Any, ...]
) -> NotWith:
    # What does not go with an update of each weight as soon as its gradient is complete.
    return NotWith(
        setting,
        why=f"uses each gradient as soon as it is complete, and {why}",
        instead=f"write {instead}, or leave fuse_optimizer_step out",
        reads=reads,
        **matched,
    )


class MemoryConfig(ConfigSection):
    """Precision, memory and speed of a training step."""

    enable_mixed_precision: Annotated[
        bool,
        CacheKey("always", value="keyed_mixed_precision"),
        Served(
            doc="Mixed precision: compute in bfloat16 with weights and optimizer states in float32."
        ),
    ] = True
    """Mixed precision: compute in bfloat16 with weights and optimizer states in float32.
    `precision` overrides it; false is an error with the mixed values of `precision`."""

    precision: Annotated[
        Precision | None,
        CacheKey("unless default", value="keyed_precision"),
        NotWith(
            "train.enable_mixed_precision",
            (False,),
            of=("bf16_mixed", "fp16_mixed"),
            why="{own} is mixed precision, and enable_mixed_precision is false",
            instead="leave enable_mixed_precision out",
        ),
    ] = None
    """Dtypes of computation and of weights. `fp32`: both float32. `bf16_mixed`: bfloat16 and
    float32. `bf16`: both bfloat16. `fp16_mixed`: float16 with dynamic loss scaling, and float32.
    Unset: `bf16_mixed`, or `fp32` with `enable_mixed_precision: false`."""

    master_weights: Annotated[
        bool | None,
        CacheKey("unless default", value="keyed_master_weights"),
        NotWith(
            "train.computes_in",
            unless=("bfloat16",),
            of=(False,),
            why="false keeps weights in bfloat16, and this run computes in {value}",
            instead="write precision: bf16, or leave {field} out",
            reads=("train.precision", "train.enable_mixed_precision"),
        ),
    ] = None
    """Master weights: keep weights in float32 while computing in bfloat16. Unset: from `precision`.
    True turns `bf16` into `bf16_mixed`; false turns `bf16_mixed` into `bf16`."""

    stochastic_rounding: Annotated[
        KeyedUnlessDefault[bool],
        OnlyWith(
            "train.optimizer",
            STOCHASTIC,
            why="{value} has no stochastic rounding",
            reads=RESULT_DTYPES,
        ),
        OnlyWith(
            "train.rounds_updates",
            words="precision: bf16",
            why="weights and optimizer states are in float32, so nothing is rounded",
            reads=RESULT_DTYPES,
        ),
        TRAINS,
    ] = False
    """Stochastic rounding of bfloat16 weights and second moments in the optimizer: up or down at
    random with the correct mean, so that small updates are not lost. The random numbers depend on
    `seed`, the step and the position in the weights, never on the parallel layout. For `adamw`,
    `anyprecision_adamw` and `muon`."""

    grad_accum_dtype: Annotated[
        Literal["fp32", "bf16"] | None, CacheKey("unless default", value="keyed_grad_accum"), TRAINS
    ] = None
    """Dtype in which the gradients of several micro-batches are accumulated. Unset: `fp32`. Under
    `fsdp2` it is `fsdp_reduce_dtype`; if both are set, they must agree."""

    loss_scale_init: Annotated[KeyedUnlessDefault[float], FP16, TRAINS] = Field(
        default=65536.0, gt=0
    )
    """`fp16_mixed`: initial loss scale. When gradients overflow, the step is skipped and the scale
    halved; it doubles after 2,000 steps without overflow."""

    enable_gradient_checkpointing: Annotated[
        Unkeyed[bool],
        Served(
            doc="Activation checkpointing: recompute activations in the backward pass instead of "
            "storing them."
        ),
    ] = True
    """Activation checkpointing: recompute activations in the backward pass instead of storing
    them. Where neither it nor another setting of stored activations is written, a run stores them
    all, or recomputes attention, the feed-forward network (`recompute_modules`), or whole layers:
    the first of these that fits by the estimate of `penstock plan`, in three quarters of a GPU's
    memory or half of a CPU's, and the next one if memory runs out. Of a model whose memory is not
    estimated, such as one trained on images, whole layers."""

    enable_reentrant: Annotated[
        Unkeyed[bool], Served(), NativeOnly("layers have keyword arguments, which it does not pass")
    ] = False
    """Activation checkpointing: use PyTorch's reentrant implementation (`use_reentrant=True`)."""

    recompute_modules: Annotated[
        Unkeyed[list[Literal["self_attn", "core_attn", "mlp", "vision"]] | None],
        RECOMPUTED,
        NativeOnly("whole layers are recomputed"),
    ] = Field(default=None, min_length=1)
    """Selective activation checkpointing: recompute only these parts of each layer: `self_attn`,
    `mlp`, or `core_attn`, which is attention without its projections (softmax(q k^T) v); and, with
    `vision`, the layers of the vision tower of a model that is trained on images. Unset: whole
    layers, of both."""

    moe_checkpoint_method: Annotated[
        Unkeyed[Literal["moe_act"] | None], RECOMPUTED, OWN_EXPERTS
    ] = None
    """Activation checkpointing of MoE layers. `moe_act` stores the tokens that were dispatched to
    experts and their outputs, and recomputes only the gate and up projections and the activation
    (and the shared experts): no token is sent twice; memory grows with the number of experts per
    token. Unset: everything is recomputed, with its communication."""

    enable_full_shard: Annotated[
        Unkeyed[bool],
        FSDP2,
        NotWith(
            "train.reshard_after_forward",
            why="false keeps weights after the forward pass, and {name}: true frees them",
            instead="write enable_full_shard: true, or leave {name} out",
        ),
        Served(
            doc="`fsdp2`: free all-gathered weights after the forward pass (ZeRO-3); false keeps "
            "them until the backward pass has used them (ZeRO-2)."
        ),
    ] = True
    """`fsdp2`: free all-gathered weights after the forward pass (ZeRO-3); false keeps them until
    the backward pass has used them, and shards only gradients and optimizer states (ZeRO-2).
    `zero_stage` overrides it; false is an error with stage 3."""

    enable_fsdp_offload: Annotated[Unkeyed[bool], FSDP2] = False
    """`fsdp2`: CPU offload: keep sharded weights, gradients and optimizer states in host memory and
    run the optimizer step on the CPU. Slow; a last resort when a model does not fit."""

    optimizer_offload: Annotated[
        Unkeyed[Literal["none", "cpu"]],
        NotWith(
            "train.enable_fsdp_offload",
            why="{name} already offloads weights, gradients and optimizer states",
        ),
        NotWith(
            "lora.reset_optimizer_on_merge",
            why="offloads optimizer states, which {name} cannot reset there",
        ),
    ] = "none"
    """`cpu`: keep optimizer states in host memory and run the optimizer step on the CPU. Weights
    and gradients stay on the GPU and are copied once a step; `enable_fsdp_offload` offloads these
    too."""

    fuse_optimizer_step: Annotated[
        Unkeyed[bool],
        _step_in_backward(
            "train.max_grad_norm",
            "gradients are clipped by their global norm",
            "max_grad_norm: 0",
            unless=(0,),
        ),
        _step_in_backward(
            "train.gradient_accumulation_steps",
            "gradients of several micro-batches are accumulated first",
            "gradient_accumulation_steps: 1",
            unless=(1,),
        ),
        _step_in_backward(
            "train.data_parallel_mode",
            "ddp all-reduces gradients in buckets",
            "data_parallel_mode: fsdp2",
            values=("ddp",),
        ),
        _step_in_backward(
            "train.tensor_parallel_size",
            "gradients are reduced over ranks at the end",
            "tensor_parallel_size: 1",
            unless=(1,),
        ),
        _step_in_backward(
            "train.pipeline_parallel_size",
            "pipeline stages accumulate gradients of several micro-batches first",
            "pipeline_parallel_size: 1",
            unless=(1,),
        ),
        _step_in_backward(
            "train.computes_in",
            "float16 overflow is known only when all gradients are complete",
            "precision: bf16_mixed",
            values=("float16",),
            reads=("train.precision",),
        ),
        _step_in_backward(
            "train.optimizer",
            "{value} updates all matrices together",
            "optimizer: adamw",
            values=("muon", "novograd"),
        ),
        _step_in_backward(
            "train.optimizer_offload",
            "gradients are copied to the host together",
            "optimizer_offload: none",
            values=("cpu",),
        ),
        _step_in_backward(
            "train.log_grad_norm",
            "norms of layers need all gradients at once",
            "log_grad_norm: true",
            values=("layers",),
        ),
    ] = False
    """Optimizer-in-backward: update each weight in the backward pass as soon as its gradient is
    complete, so that gradients are never in memory all at once. For steps of one micro-batch with
    `max_grad_norm: 0`, under `none` or `fsdp2`."""

    enable_forward_prefetch: Annotated[
        Unkeyed[bool],
        Served(
            documented=False,
            doc="`fsdp2`: all-gather the next unit's weights during the forward pass of the current"
            " one. If it is not written: enabled where it helps.",
        ),
    ] = True
    """`fsdp2`: all-gather the next layer's weights during the forward pass of the current one."""

    enable_activation_offload: Annotated[
        Unkeyed[bool], Served(), NativeOnly(write="enable_gradient_checkpointing: true")
    ] = False
    """Activation offload: move activations that are saved for the backward pass to host memory, and
    back before they are used, in parallel with the computation. With activation checkpointing these
    are little more than the input of each layer."""

    activation_gpu_limit: Annotated[Unkeyed[float], OFFLOADED] = Field(default=0.0, ge=0)
    """Activation offload: gigabytes of activations that stay on the GPU: the newest, which the
    backward pass uses first. 0: all are moved, except those of the two layers that are being
    copied."""

    enable_compile: Annotated[
        Unkeyed[bool],
        Served(doc="Compile the layers with `torch.compile` when the workers start."),
        NativeOnly(),
    ] = False
    """Compile the layers with `torch.compile` when training starts: one graph for all layers of a
    kind, for any sequence and document lengths, dropout masks and routing. With expert parallelism
    a layer is a few graphs, between which tokens are dispatched; with `moe_implementation: eager`
    or `moe_checkpoint_method: moe_act` experts are not compiled. Needs a C++ compiler on CPUs,
    Triton on GPUs."""

    init_device: Annotated[
        Unkeyed[Literal["cpu", "cuda", "meta", "npu"] | None],
        NotWith(
            "train.data_parallel_mode",
            ("fsdp2",),
            spares=("meta",),
            why="{name}: {value} cannot initialize on {own}, where every rank would hold the whole"
            " model",
            instead="write init_device: meta or leave it out",
        ),
        NotWith(
            "train.data_parallel_mode",
            unless=("fsdp2",),
            of=("npu",),
            why="training runs on CPUs and CUDA devices, not on npu",
            instead="write cpu, or leave it out",
        ),
        Served(
            documented="meta",
            doc="Device on which weights are created before they are loaded. If it is not written: "
            "`meta` under `fsdp2`, otherwise the training device.",
        ),
    ] = None
    """Device on which weights are created before they are loaded. Unset: `meta` under `fsdp2`,
    which accepts nothing else; otherwise the training device. `npu` is an error: NPUs are not
    supported."""

    load_weights_mode: Unkeyed[Literal["broadcast", "all_ranks"]] = "broadcast"
    """`broadcast`: one rank reads the weights and sends them to the others; `all_ranks`: each rank
    reads them."""

    enable_full_determinism: Annotated[
        Unkeyed[bool],
        OnlyWith(
            "train.allow_cuda_launch_blocking",
            why="sets CUDA_LAUNCH_BLOCKING=1, which makes every kernel launch synchronous",
        ),
    ] = False
    """Use deterministic kernels only, with `CUDA_LAUNCH_BLOCKING=1`; operations without such a
    kernel fail. Slow. Needs `allow_cuda_launch_blocking`."""

    allow_cuda_launch_blocking: Unkeyed[bool] = False
    """Allow `CUDA_LAUNCH_BLOCKING=1`, which makes every kernel launch synchronous. Without this, a
    run that finds it in the environment is an error."""

    empty_cache_steps: Unkeyed[int] = Field(default=500, ge=0)
    """Call `torch.cuda.empty_cache` every `empty_cache_steps` steps; 0: never."""

    gc_steps: Unkeyed[int] = Field(default=500, ge=0)
    """Run Python's garbage collection every `gc_steps` steps, and only then; 0: Python decides."""

    @property
    def resolved_precision(self) -> Precision:
        """The precision that `precision`, `enable_mixed_precision` and `master_weights` give:
        `precision` overrides the second, and `master_weights` decides between `bf16_mixed` and
        `bf16`."""
        precision = self.precision or ("bf16_mixed" if self.enable_mixed_precision else "fp32")
        if self.master_weights is not None and precision in ("bf16", "bf16_mixed"):
            return "bf16_mixed" if self.master_weights else "bf16"
        return precision

    @property
    def keyed_mixed_precision(self) -> bool:
        return self.resolved_precision != "fp32"

    @property
    def keyed_precision(self) -> Precision | None:
        """`precision` in keys: null where `enable_mixed_precision` says the same."""
        written = self.resolved_precision
        return None if written in ("bf16_mixed", "fp32") else written

    @property
    def keyed_master_weights(self) -> None:
        """`master_weights` in keys: nothing that the precision does not say."""

    @property
    def computes_in(self) -> Literal["float32", "bfloat16", "float16"]:
        return COMPUTES_IN[self.resolved_precision]

    @property
    def rounds_weights(self) -> bool:
        """Whether layers compute with weights that are rounded from those of the optimizer."""
        return self.computes_in != self.keeps_in

    @property
    def keeps_in(self) -> Literal["float32", "bfloat16"]:
        """Dtype of trained weights, as torch calls it."""
        return "bfloat16" if self.resolved_precision == "bf16" else "float32"


COMPUTES_IN: Mapping[Precision, Literal["float32", "bfloat16", "float16"]] = {
    "fp32": "float32",
    "bf16_mixed": "bfloat16",
    "bf16": "bfloat16",
    "fp16_mixed": "float16",
}
