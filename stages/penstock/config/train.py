"""The training section: one mapping in the file, composed of one class per idea."""

from pydantic import Field

from penstock.config.balance import BalanceConfig
from penstock.config.batch import BatchConfig
from penstock.config.budget import BudgetConfig
from penstock.config.checkpoint import CheckpointConfig
from penstock.config.dropout import DropoutConfig
from penstock.config.evaluation import EvaluationConfig
from penstock.config.fp8 import Fp8TrainingConfig
from penstock.config.logging import LoggingConfig
from penstock.config.loss import LossConfig
from penstock.config.memory import MemoryConfig
from penstock.config.optim import OptimConfig
from penstock.config.parallel import ParallelConfig


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

    dropout: DropoutConfig = Field(default_factory=DropoutConfig)
    """What is dropped at random while training."""
