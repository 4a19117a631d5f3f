"""What a model family is: how its config.json is read, and what its modules are."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HfConfig
from penstock.models.tp_roles import Roles
from penstock.models.weights import WeightMap

ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
UNGATED_PARTS = (*ATTENTION_PARTS, "up_proj", "down_proj")
LINEAR_PARTS = (*ATTENTION_PARTS, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """One architecture, under the name that Hugging Face's config.json gives it."""

    model_type: str
    architecture: str
    """The class of transformers that computes it, as config.json's `architectures` names it."""
    read: Callable[[HfConfig], DecoderConfig]
    """config.json to DecoderConfig; raises ConfigError and CapabilityError."""
    roles: Roles
    lora_targets: tuple[str, ...] = LINEAR_PARTS
    """The linear layers that adapters go on unless others are named."""

    def weight_map(self, config: DecoderConfig, *, merge_qkv: bool = False) -> WeightMap:
        """The names and shapes of such a model's tensors."""
        return WeightMap(config, merge_qkv)
