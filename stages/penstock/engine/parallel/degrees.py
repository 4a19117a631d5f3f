"""From settings and a world size to the degree of each axis. The only place where they multiply.

No torch here: plans and keys need the global batch before anything heavy is imported.
"""

from dataclasses import dataclass

from penstock.config.train import TrainConfig
from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis takes; the product is the world."""

    replicate: int
    shard: int

    @property
    def num_replicas(self) -> int:
        """Ranks that each compute rows of their own."""
        return self.replicate * self.shard


def degrees_of(train: TrainConfig, world: int) -> Degrees:
    """The layout that `train` asks for on `world` ranks. Raises ConfigError if there is none."""
    mode = train.data_parallel_mode
    if mode == "none" and world > 1:
        raise ConfigError(
            f"train.data_parallel_mode is none, which trains on one process, and {world} were "
            "asked for.\n  Write launch.nproc_per_node: 1, or train.data_parallel_mode: fsdp2."
        )
    shard_size = train.data_parallel_shard_size
    if mode == "fsdp2":
        if shard_size not in (-1, world):
            raise ConfigError(
                f"train.data_parallel_shard_size is {shard_size}, and there are {world} ranks.\n"
                f"  Write {world}, or -1 for all ranks there are."
            )
        return Degrees(replicate=1, shard=world)
    if shard_size not in (-1, 1):
        raise ConfigError(
            f"train.data_parallel_shard_size is {shard_size}, and train.data_parallel_mode {mode} "
            "shards nothing.\n  Write 1 or -1, or train.data_parallel_mode: fsdp2."
        )
    return Degrees(replicate=world, shard=1)


def rows_per_step(train: TrainConfig, num_replicas: int) -> int:
    """Packed rows in one optimizer step over all replicas: the global batch."""
    if train.global_batch_size is not None:
        return train.global_batch_size
    return train.micro_batch_size * train.gradient_accumulation_steps * num_replicas


def accumulation_steps(train: TrainConfig, num_replicas: int) -> int:
    """Micro-batches each replica runs per optimizer step.

    Raises ConfigError when the global batch cannot be cut that way.
    """
    if train.global_batch_size is None:
        return train.gradient_accumulation_steps
    at_once = train.micro_batch_size * num_replicas
    steps, rest = divmod(train.global_batch_size, at_once)
    if rest or not steps:
        nearest = max(1, steps) * at_once
        raise ConfigError(
            f"train.global_batch_size is {train.global_batch_size}, which {num_replicas} replicas "
            f"of train.micro_batch_size {train.micro_batch_size} cannot share evenly.\n"
            f"  Write a multiple of {at_once}, for example {nearest}, or change the other two."
        )
    written = "gradient_accumulation_steps" in train.model_fields_set
    if written and train.gradient_accumulation_steps != steps:
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} on {num_replicas} replicas with "
            f"train.micro_batch_size {train.micro_batch_size} takes {steps} accumulation steps, "
            f"and train.gradient_accumulation_steps is {train.gradient_accumulation_steps}.\n"
            f"  Write {steps}, or leave one of the two out."
        )
    return steps
