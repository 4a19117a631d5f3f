"""The definition of a model family: how to read its config.json, and the roles of its modules."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HfConfig
from penstock.models.mtp_config import MTPConfig, MTPNames
from penstock.models.multimodal import language_config
from penstock.models.tp_roles import DECODER_ROLES, Roles
from penstock.models.weights import WeightMap

ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
UNGATED_PARTS = (*ATTENTION_PARTS, "up_proj", "down_proj")
FUSED_GATE_UP_PARTS = (*ATTENTION_PARTS, "gate_up_proj", "down_proj")
LINEAR_PARTS = (*ATTENTION_PARTS, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """A model family, named as in Hugging Face's config.json."""

    model_type: str
    architecture: str
    """The transformers class, as `architectures` in config.json names it."""
    read: Callable[[HfConfig], DecoderConfig]
    """Converts a config.json to a DecoderConfig; raises ConfigError and CapabilityError."""
    roles: Roles = field(default_factory=lambda: DECODER_ROLES)
    lora_targets: tuple[str, ...] = LINEAR_PARTS
    """Default LoRA targets."""
    multimodal: str = ""
    """The backbone in transformers' class, with a dot at the end, if it is the language model of a
    multimodal model, whose config.json `read` takes."""
    mtp: MTPNames | None = None
    """Of the layers that predict further tokens; None where they cannot be trained."""

    def trained_config(self, hf: HfConfig, *, mtp: bool) -> DecoderConfig:
        """The DecoderConfig, with `mtp` that of the model with the layers that predict further
        tokens; these have experts if any layer has."""
        config = self.read(hf)
        count = self.mtp.num_layers(language_config(hf)) if self.mtp and mtp else 0
        if self.mtp is None or not count:
            return config
        experts, first = config.experts, config.num_hidden_layers
        if experts is not None:
            experts = replace(experts, layers=(*experts.layers, *range(first, first + count)))
        return replace(config, experts=experts, mtp=MTPConfig(count, self.mtp))

    def weight_map(self, config: DecoderConfig, *, merge_qkv: bool = False) -> WeightMap:
        return WeightMap(config, merge_qkv, self.multimodal)
