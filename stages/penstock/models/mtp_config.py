"""Multi-token prediction (MTP): how many layers predict further tokens, and their names in
checkpoints. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AT_LAYER = "model.layers.{layer}"


@dataclass(frozen=True)
class MTPNames:
    """Names of a family, in which `{layer}` is the index after those of the decoder and `{depth}`
    the one from 0."""

    count: str = "num_nextn_predict_layers"
    """The field of config.json that counts the layers."""
    default: int = 0
    """Their number where config.json has no such field."""
    block: str = AT_LAYER
    """The transformer block."""
    enorm: str = f"{AT_LAYER}.enorm"
    hnorm: str = f"{AT_LAYER}.hnorm"
    eh_proj: str = f"{AT_LAYER}.eh_proj"
    norm: str = f"{AT_LAYER}.shared_head.norm"
    embedding: str = f"{AT_LAYER}.embed_tokens.weight"
    """A copy of the model's embedding; empty: none."""
    head: str = f"{AT_LAYER}.shared_head.head.weight"
    """A copy of its head."""

    @property
    def shares_projection(self) -> bool:
        return "{" not in self.eh_proj

    def num_layers(self, hf: Mapping[str, Any]) -> int:
        """The layers that a config.json counts."""
        return int(hf.get(self.count, self.default) or 0)


DEEPSEEK_MTP = MTPNames()
"""As DeepSeek V3 and GLM 4.5 are published."""

QWEN3_NEXT_MTP = MTPNames(
    default=1,
    block="mtp.layers.{depth}",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    eh_proj="mtp.fc",
    norm="mtp.norm",
    embedding="",
    head="",
)
"""As Qwen3-Next is published."""


@dataclass(frozen=True)
class MTPConfig:
    """The layers of a model that predict further tokens, one for each depth."""

    num_layers: int
    names: MTPNames
