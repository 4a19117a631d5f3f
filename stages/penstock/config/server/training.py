"""Training settings of a server: parallelism, memory, optimizer; part of its flat file."""

from typing import Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.parallelism import Ranks, RanksOrRest


class ServerTraining(ConfigSection):
    """Parallelism, memory, optimizer and packing.

    Fields without a docstring have that of the run's field (`run_fields.py: SAME`).
    """

    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = "fsdp2"
    data_parallel_shard_size: RanksOrRest = 1
    data_parallel_replicate_size: RanksOrRest = 1
    tensor_parallel_size: Ranks = 1
    pipeline_parallel_size: Ranks = 1
    pipeline_parallel_schedule: Literal["1F1B", "GPipe"] = "1F1B"
    """Pipeline schedule. `1F1B` stores few activations; `GPipe` is simpler."""

    pp_variable_seq_lengths: bool = True
    expert_parallel_size: Ranks = 1
    ulysses_parallel_size: Ranks = 1
    ringattn_parallel_size: Ranks = 1
    cp_fsdp_mode: Literal["all", "ulysses_only", "ring_only", "none"] = "all"
    reshard_after_forward: bool = True
    """`fsdp2`: free all-gathered weights after the forward pass (less memory) or keep them for the
    backward pass (less traffic)."""

    seed: int = Field(default=42, ge=0)
    """Random seed of initial weights: those of adapters whose clients give no seed, and those of a
    base model without weights to load. Generations without a seed are different each time."""

    enable_mixed_precision: bool = True
    """Mixed precision: compute in bfloat16 with weights and optimizer states in float32."""

    enable_gradient_checkpointing: bool = True
    enable_full_shard: bool = True
    """`fsdp2`: free all-gathered weights after the forward pass (ZeRO-3); false keeps them until
    the backward pass has used them (ZeRO-2)."""

    enable_activation_offload: bool = False
    enable_compile: bool = False
    """Compile the layers with `torch.compile` when the workers start."""

    enable_reentrant: bool = False
    enable_forward_prefetch: bool = False
    """`fsdp2`: all-gather the next unit's weights during the forward pass of the current one. If it
    is not written: enabled where it helps."""

    init_device: Literal["cpu", "cuda", "meta"] = "meta"
    """Device on which weights are created before they are loaded. If it is not written: `meta`
    under `fsdp2`, otherwise the training device."""

    ce_mode: Literal["eager", "compiled", "chunked"] = "compiled"
    """Implementation of the LM head and the cross-entropy, as `train.ce_mode` of a run. If it is
    not written: `chunked`, which gives the same without a compiler."""

    optimizer: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] = "adamw"
    """Optimizer if a client does not request one."""

    optimizer_dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of the optimizer states of `anyprecision_adamw` and `muon`."""

    muon_lr: float = Field(default=0.02, ge=0)
    """Muon: learning rate of the weight matrices."""

    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    muon_nesterov: bool = True
    muon_ns_steps: int = Field(default=5, gt=0, lt=100)
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    sample_packing_sequence_len: int = Field(default=32_000, gt=0)
    """Maximum length of a packed sequence, and so of a sample, in tokens."""

    enable_packing: bool = True
    """Pack samples into sequences, with attention masked between them; false: each sample has a
    sequence of its own."""

    sample_packing_strategy: Literal["sequential", "best_fit", "balanced_dp"] = "sequential"
    """Sequence packing: consecutive samples (`sequential`), samples that fill sequences best
    (`best_fit`), or sequences that balance the computation over data-parallel replicas
    (`balanced_dp`)."""

    pad_to_multiple_of: int = Field(default=128, gt=0)
    log_gradient_norms: bool = True
    """Report the gradient norm of each type of layer with each backward pass."""

    log_router_stats: bool = True
    """Mixture of experts: report with each backward pass how evenly tokens were distributed over
    experts."""
