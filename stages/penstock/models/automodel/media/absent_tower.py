"""Vision towers of the library timm, whose models are not trained here: the model has one without
parameters instead, and takes text. Exports have the tower of the base model."""

from copy import copy
from functools import cache
from typing import Any

# transformers' class of a model of timm, which cannot be built where timm is not installed.
WRAPPER = "TimmWrapperModel"

WHY = "its vision tower is a model of the library timm, which is not built"


def has_absent_tower(config: Any) -> bool:
    """Whether the vision tower of a config is a model of timm."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES  # noqa: PLC0415

    vision = getattr(config, "vision_config", None)
    return MODEL_MAPPING_NAMES.get(getattr(vision, "model_type", "")) == WRAPPER


def without_tower(config: Any) -> Any:
    """A copy of a config of which transformers builds a tower without parameters."""
    config = copy(config)
    absent = _config_class(type(config.vision_config))
    config.vision_config = absent.from_dict(config.vision_config.to_dict())
    return config


@cache
def _config_class(tower: type) -> Any:
    from transformers import AutoModel, PreTrainedModel  # noqa: PLC0415

    class AbsentTowerConfig(tower):
        pass

    class AbsentTower(PreTrainedModel):
        config_class = AbsentTowerConfig
        # A tower without attention is no reason to refuse an implementation to the others.
        _supports_sdpa = _supports_attention_backend = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.post_init()

    AutoModel.register(AbsentTowerConfig, AbsentTower)
    return AbsentTowerConfig
