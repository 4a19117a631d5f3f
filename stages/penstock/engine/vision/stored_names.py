"""Names in files of the tensors of a vision part."""

from collections.abc import Iterable, Mapping

from penstock.core.errors import CapabilityError
from penstock.models.multimodal import BACKBONE, is_language
from penstock.models.vision.tower import VisionTower


def checkpoint_names(stored: Iterable[str], tower: VisionTower) -> Mapping[str, str]:
    """The names here (`model.` and those of transformers' model class) of the tensors of the vision
    part that files have, by their names in the files.

    Raises CapabilityError for files in which they have another form.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    model = tower.hf_model
    transforms = get_model_conversion_mapping(model)
    renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
    own_names = dict.fromkeys((name for name, _ in tower.named_parameters()), True)
    prefix = model.base_model_prefix or BACKBONE.rstrip(".")
    names: dict[str, str] = {}
    for source in stored:
        if is_language(source):
            continue
        # By the rules with which `from_pretrained` finds the parameter of a tensor (transformers
        # 5.23).
        name, pattern = rename_source_key(source, renamings, converters, prefix, own_names)
        if pattern is not None:
            raise CapabilityError(
                f"{source} of the checkpoint is of the vision part in an older form.\n"
                "  Load the model with transformers, save it again, and use that folder."
            )
        if name in own_names:
            names[source] = BACKBONE + name
    return names
