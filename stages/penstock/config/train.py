"""The training section: one flat mapping in the file, composed of one class per idea."""

from penstock.config.batch import BatchConfig
from penstock.config.checkpoint import CheckpointConfig
from penstock.config.logging import LoggingConfig
from penstock.config.memory import MemoryConfig
from penstock.config.optim import OptimConfig
from penstock.config.parallel import ParallelConfig


# Pydantic takes the fields of the last base first.
class TrainConfig(
    LoggingConfig, CheckpointConfig, MemoryConfig, BatchConfig, OptimConfig, ParallelConfig
):
    """Everything about training that is neither the model nor the data."""
