"""What is asked of a model that it cannot do, by its config.json.

No torch here: it is judged before any process starts.
"""

from penstock.config.run import RunConfig
from penstock.config.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.balance import has_experts, require_routers
from penstock.engine.positions import require_prompts_apart, require_whole_documents
from penstock.models.hf_config import HfConfig


def require_possible(run: RunConfig, hf: HfConfig) -> None:
    """Raise ConfigError or CapabilityError for the first such thing."""
    require_routers(run, hf)
    require_dense_networks(run.train, hf)
    require_whole_documents(run.train, hf)
    require_prompts_apart(run.data, hf)


def require_dense_networks(train: TrainConfig, hf: HfConfig) -> None:
    """Raise ConfigError where networks are to drop something within and the model has experts."""
    if train.dropout.ffn and has_experts(hf):
        raise ConfigError(
            f"train.dropout.ffn is {train.dropout.ffn:g}, and this {hf.get('model_type')} has "
            "experts, within which nothing is dropped.\n"
            "  Write train.dropout.hidden instead: it drops from what experts make of a token too."
        )
