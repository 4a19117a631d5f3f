"""The parts of a multimodal model: which are frozen (`model.freeze`), and how fast they learn."""

from collections.abc import Callable, Collection, Iterable

from penstock.config.schema.model import Part
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.param_shards import LocalParam
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.moe import ModalityMoE
from penstock.models.vision.types import VISION, VisionConfig

# Frozen where the config does not say.
DEFAULT: tuple[Part, ...] = ("vision", "projector")


def frozen_parts(run: RunConfig) -> Collection[Part]:
    """The parts of a model trained on images that are frozen."""
    return DEFAULT if run.model.freeze is None else run.model.freeze


def freeze_image_experts(model: Decoder) -> None:
    """Freeze the routers and experts of images, which data without images does not call."""
    for module in model.modules():
        if isinstance(module, ModalityMoE):
            module.image.requires_grad_(False)


def freeze(model: Decoder, parts: Collection[Part]) -> None:
    """Freeze these parts of a model, or of a pipeline stage, in place."""
    if "language" in parts:
        model.requires_grad_(False)
    if model.vision is None:
        return
    for name, parameter in model.vision.named_parameters():
        part = "projector" if model.vision.config.is_projector(name) else "vision"
        parameter.requires_grad_(part not in parts)


def checked_parts(
    train: TrainConfig,
    params: Iterable[LocalParam],
    config: DecoderConfig,
    vision: VisionConfig | None,
    mesh: Mesh,
) -> Callable[[str], Part]:
    """Parameter name -> the part of the model that it is of; of its adapters, too. Raises
    ConfigError for the learning rate of a part of which no parameter is trained."""

    def part(name: str) -> Part:
        if isinstance(config, AutoModelConfig):
            return config.outline.part(name)
        if vision is None or not name.startswith(VISION):
            return "language"
        return "projector" if vision.is_projector(name.removeprefix(VISION)) else "vision"

    trained = {part(param.name) for param in params if param.parameter.requires_grad}
    for name, lr in (("vision", train.vision_lr), ("projector", train.projector_lr)):
        # The first pipeline stage has the vision part.
        if lr is not None and name not in trained and mesh.index("pipeline") == 0:
            raise ConfigError(
                f"train.{name}_lr is {lr:g}, and no parameter of the {name} is trained.\n"
                f"  Leave {name}_lr out, or use data with images, and with LoRA targets of the"
                f" {name} (lora.lora_target_modules)."
            )
    return part
