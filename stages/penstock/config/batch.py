"""How many rows make a step."""

from pydantic import Field

from penstock.config.section import Section


class BatchConfig(Section):
    """Batch sizes."""

    micro_batch_size: int = Field(default=1, gt=0)
    """Packed rows that one rank computes at once."""

    gradient_accumulation_steps: int = Field(default=1, gt=0)
    """Micro-batches that one rank adds up before the optimizer steps."""

    global_batch_size: int | None = Field(default=None, gt=0)
    """Packed rows of one optimizer step over all ranks. Unset: `micro_batch_size` times
    `gradient_accumulation_steps` times the number of data-parallel ranks. With it, a run's result
    does not depend on the number of ranks."""

    seed: int = Field(default=42, ge=0)
    """Seed of every random choice: shuffling, initial weights, dropout."""
