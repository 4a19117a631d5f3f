"""Which loss is trained on, and how it is computed."""

from typing import Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Keyed, KeyedByContent, KeyedUnlessDefault, Unkeyed
from penstock.config.schema.checkpoint import CheckpointConfig
from penstock.config.schema.duration import BudgetConfig
from penstock.config.schema.evaluation import EvaluationConfig
from penstock.config.schema.fp8 import Fp8TrainingConfig
from penstock.config.schema.logging import LoggingConfig
from penstock.config.schema.memory import MemoryConfig
from penstock.config.schema.optimizer import OptimConfig
from penstock.config.schema.parallelism import ParallelConfig


class BalanceConfig(ConfigSection):
    """What is asked of routers besides a low loss. `loss` in the metrics is without it."""

    moe_aux_loss_coef: KeyedUnlessDefault[float | None] = Field(default=None, ge=0)
    """Mixture of experts: what the load-balancing loss is multiplied by when it is added to the
    loss. Unset: the model's own `router_aux_loss_coef` where its config.json, or
    `model.foundation`, has `output_router_logits: true`, and otherwise 0, as in transformers."""

    moe_global_load_balancing: KeyedUnlessDefault[bool] = False
    """Ask experts to be used alike by the tokens of a whole step, over all ranks and micro-batches,
    so that single rows may favour some; false asks it of each packed row. With several
    micro-batches on a rank a step costs a second forward pass."""

    moe_z_loss_coef: KeyedUnlessDefault[float] = Field(default=0.0, ge=0)
    """Mixture of experts: what the z-loss is multiplied by, the mean over tokens and layers of the
    squared logarithm of the sum of exponentials of a router's logits, which keeps them small. 1e-3
    is usual where it is used."""

    moe_bias_update_rate: KeyedUnlessDefault[float] = Field(default=0.0, ge=0)
    """Mixture of experts whose choice has a bias (ERNIE 4.5, GLM-4.5): after each step raise the
    biases of experts that got fewer tokens than the mean by this much, and lower the others'. 1e-3
    is usual; 0 leaves them as they are."""


class BatchConfig(ConfigSection):
    """Batch sizes."""

    micro_batch_size: KeyedByContent[int] = Field(default=1, gt=0)
    """Packed rows that one rank computes at once."""

    gradient_accumulation_steps: KeyedByContent[int] = Field(default=1, gt=0)
    """Micro-batches that one rank adds up before the optimizer steps. With `global_batch_size`, 1
    leaves their number to it, and another must agree with it."""

    global_batch_size: KeyedByContent[int | None] = Field(default=None, gt=0)
    """Packed rows of one optimizer step over all ranks. Unset: `micro_batch_size` times
    `gradient_accumulation_steps` times the number of data-parallel ranks. With it, a run's result
    does not depend on the number of ranks."""

    seed: Keyed[int] = Field(default=42, ge=0)
    """Seed of every random choice: shuffling, initial weights, dropout."""


class DropoutConfig(ConfigSection):
    """Numbers that are dropped at random while training, each with so large a probability. Which
    ones depends on `train.seed`, the step and the token, and never on the layout. An evaluation
    drops none."""

    hidden: float = Field(default=0.0, ge=0, lt=1)
    """Of what each layer's attention and feed-forward network add to the hidden states."""

    ffn: float = Field(default=0.0, ge=0, lt=1)
    """Of what each layer's feed-forward network computes within, before its last matrix. For models
    without experts."""

    attention: float = Field(default=0.0, ge=0, lt=1)
    """Of the weights by which attention sums values. They are then all written out, so attention is
    plain (`eager`), and its memory grows with the square of a sample's length."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps in which all rise in a line from 0, which they are in the first one, and
    then stay. 0: they are what is written at once."""

    depth_scaling: bool = False
    """Drop less in earlier layers: in layer l of L, counted from 0, l / L of what is written."""


class LossConfig(ConfigSection):
    """The loss. That of tokens is always told as plain cross-entropy in validation."""

    objective: KeyedByContent[Literal["sft", "pretrain", "preference"]] = "sft"
    """What is learnt. `sft`: the tokens that the data mark as trained, such as answers. `pretrain`:
    every token of plain texts (data of type `text`). `preference`: which of two answers is better,
    as the section `preference` says."""

    ce_mode: Unkeyed[Literal["eager", "compiled", "chunked"]] = "chunked"
    """How the head and the loss are computed. `chunked`: a chunk of tokens at a time, whose logits
    turn into gradients where they lie, by Triton kernels on GPUs. `compiled`: the same with kernels
    that `torch.compile` makes when training starts. `eager`: by PyTorch's own operations from the
    logits of all trained tokens at once, which takes by far the most memory. Tokens that are not
    trained never reach the head."""

    label_smoothing: KeyedUnlessDefault[float] = Field(default=0.0, ge=0, lt=1)
    """The share of each target that is spread evenly over the vocabulary. `loss` in the metrics is
    with it."""

    z_loss_coef: KeyedUnlessDefault[float] = Field(default=0.0, ge=0)
    """What the squared logarithm of the sum of exponentials of a token's logits is multiplied by
    before it is added to the token's loss, which keeps logits from drifting. 1e-4 is usual where it
    is used. `loss` in the metrics is with it."""


# Pydantic takes the fields of the last base first.
class TrainConfig(
    LoggingConfig,
    EvaluationConfig,
    CheckpointConfig,
    Fp8TrainingConfig,
    MemoryConfig,
    BudgetConfig,
    BatchConfig,
    LossConfig,
    BalanceConfig,
    OptimConfig,
    ParallelConfig,
):
    """Everything about training that is neither the model nor the data."""

    dropout: KeyedUnlessDefault[DropoutConfig] = Field(default_factory=DropoutConfig)
    """What is dropped at random while training."""

    @property
    def resolved_zero_stage(self) -> Literal[1, 2, 3]:
        """`zero_stage`, `reshard_after_forward` and `enable_full_shard` in one, under `fsdp2`: the
        first of them that is written decides."""
        if self.zero_stage is not None:
            return self.zero_stage
        if self.reshard_after_forward is not None:
            return 3 if self.reshard_after_forward else 2
        # A pipeline runs forward passes of several micro-batches before a backward pass: freed
        # weights would be gathered once for each.
        return 2 if not self.enable_full_shard or self.pipeline_parallel_size > 1 else 3
