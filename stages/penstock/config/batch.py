"""How many rows make a step, and how many steps a run."""

from pydantic import Field

from penstock.config.section import Section


class BatchConfig(Section):
    """Batch sizes and the length of a run."""

    micro_batch_size: int = Field(default=1, gt=0)
    """Packed rows that one rank computes at once."""

    gradient_accumulation_steps: int = Field(default=1, gt=0)
    """Micro-batches that one rank adds up before the optimizer steps."""

    global_batch_size: int | None = Field(default=None, gt=0)
    """Packed rows of one optimizer step over all ranks. Unset: `micro_batch_size` times
    `gradient_accumulation_steps` times the number of data-parallel ranks. With it, a run's result
    does not depend on the number of ranks."""

    num_train_epochs: int = Field(default=1, gt=0)
    """Passes over the data."""

    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps after which training ends, whatever `num_train_epochs` says; the learning
    rate's schedule ends there too."""

    seed: int = Field(default=42, ge=0)
    """Seed of every random choice: shuffling, initial weights, dropout."""
