"""How a training server's ranks compute: part of its flat file."""

from typing import Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.parallelism import Ranks, RanksOrRest


class ServerTraining(ConfigSection):
    """Layout over ranks, memory, and the optimizer."""

    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = "fsdp2"
    """Data parallelism: `none`, `ddp` (a whole model on each rank), or `fsdp2` (sharded)."""

    data_parallel_shard_size: RanksOrRest = 1
    """Ranks that share one copy of the weights under `fsdp2`. -1: all that the other axes leave."""

    data_parallel_replicate_size: RanksOrRest = 1
    """Copies of the weights, each of which computes rows of its own. -1: one under `fsdp2`, under
    `ddp` all that the other axes leave."""

    tensor_parallel_size: Ranks = 1
    """Ranks that split each weight matrix."""

    pipeline_parallel_size: Ranks = 1
    """Ranks that split the layers."""

    pipeline_parallel_schedule: Literal["1F1B", "GPipe"] = "1F1B"
    """Order of micro-batches in a pipeline."""

    pp_variable_seq_lengths: bool = True
    """Pad the micro-batches of a pipeline's step to the longest of them; false pads all to the
    length of a full one."""

    expert_parallel_size: Ranks = 1
    """Ranks that share the experts of a mixture-of-experts model."""

    ulysses_parallel_size: Ranks = 1
    """Ranks that split a row by tokens, and for attention by heads."""

    ringattn_parallel_size: Ranks = 1
    """Ranks that split a row by tokens and pass keys and values around a ring."""

    cp_fsdp_mode: Literal["all", "ulysses_only", "ring_only", "none"] = "all"
    """`fsdp2`: over which of the axes that split a row weights are sharded too."""

    reshard_after_forward: bool = True
    """`fsdp2`: free gathered weights after the forward pass."""

    seed: int = Field(default=42, ge=0)
    """Of weights that are drawn: those of adapters whose clients give no seed, and those of a model
    that has none to load. Samples without a seed are drawn anew each time."""

    enable_mixed_precision: bool = True
    """Compute in bfloat16 while weights and optimizer states stay in float32."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them."""

    enable_full_shard: bool = True
    """`fsdp2`: free gathered weights after the forward pass (ZeRO-3)."""

    enable_activation_offload: bool = False
    """Move what layers keep for the backward pass to host memory."""

    enable_compile: bool = False
    """Compile what layers compute with `torch.compile`."""

    enable_reentrant: bool = False
    """Use PyTorch's reentrant form of recomputation."""

    enable_forward_prefetch: bool = False
    """`fsdp2`: gather the next unit's weights during the forward pass of this one. Where it is not
    written, that is done where it helps."""

    init_device: Literal["cpu", "cuda", "meta"] = "meta"
    """Where weights are created before they are loaded. Where it is not written: `meta` under
    `fsdp2`, otherwise the training device."""

    ce_mode: Literal["eager", "compiled", "chunked"] = "compiled"
    """How the head and the loss are computed, as `train.ce_mode` of a run. Where it is not written,
    by the kernels that need no compiler, which give the same (`chunked`)."""

    optimizer: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] = "adamw"
    """Optimizer of models that are not asked for with another."""

    optimizer_dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the optimizer's states under `anyprecision_adamw` and `muon`."""

    muon_lr: float = Field(default=0.02, ge=0)
    """Muon: learning rate of the weight matrices."""

    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon: momentum."""

    muon_nesterov: bool = True
    """Muon: Nesterov momentum."""

    muon_ns_steps: int = Field(default=5, gt=0, lt=100)
    """Muon: Newton-Schulz iterations."""

    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """Muon: scaling of the learning rate by a matrix's shape."""

    sample_packing_sequence_len: int = Field(default=32_000, gt=0)
    """Most tokens of a packed row, and so of a sample."""

    enable_packing: bool = True
    """Let samples share rows, in which they do not see one another; false: each has its own."""

    sample_packing_strategy: Literal["sequential", "best_fit", "balanced_dp"] = "sequential"
    """Which samples share a row: those that come after one another (`sequential`), those that fill
    rows best (`best_fit`), or so that replicas have as much to do as each other
    (`balanced_dp`)."""

    pad_to_multiple_of: int = Field(default=128, gt=0)
    """Rows are padded to a multiple of so many tokens."""

    log_gradient_norms: bool = True
    """Tell the norm of the gradients of each type of layer with each backward pass."""

    log_router_stats: bool = True
    """Mixture of experts: tell with each backward pass how evenly tokens were shared out among
    experts."""
