"""transformers' model of a base model: its embeddings and layers, by the names in files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.core.errors import CapabilityError
from penstock.models.automodel.build import build_config, build_meta


@dataclass(frozen=True)
class Embeddings:
    """Tensor names in files; None for a tensor that the model does not have."""

    embedding: str | None
    head: str | None
    is_tied: bool
    """Whether transformers ties the head to the embedding (`tie_word_embeddings`)."""


class TransformersNames:
    """What transformers' model of a config.json calls the tensors of files."""

    def __init__(self, hf_config: Mapping[str, Any], names: Iterable[str]) -> None:
        """`names` are those of the tensors in files. The model is built when it is needed."""
        self._hf_config, self._names = hf_config, list(names)

    def stored(self, name: str) -> str:
        """The name in files of a module or a tensor; the name itself if they do not have it."""
        by_name, weight = self._stored, f"{name}.weight"
        if weight in by_name:
            return by_name[weight].removesuffix(".weight")
        return by_name.get(name, name)

    def is_conv1d(self, layer: str) -> bool:
        return layer in self._conv1d

    @cached_property
    def _conv1d(self) -> set[str]:
        from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - takes seconds

        modules = self._model.named_modules() if self._model is not None else ()
        return {self.stored(name) for name, module in modules if isinstance(module, Conv1D)}

    @cached_property
    def embeddings(self) -> Embeddings | None:
        """None for a model type that transformers cannot build."""
        if (model := self._model) is None:
            return None
        modules = {id(module): name for name, module in model.named_modules()}
        embedding = modules.get(id(model.get_input_embeddings()))
        head = modules.get(id(model.get_output_embeddings()))
        tied = dict(model.all_tied_weights_keys)
        return Embeddings(
            embedding and self.stored(f"{embedding}.weight"),
            head and self.stored(f"{head}.weight"),
            f"{head}.weight" in tied,
        )

    @cached_property
    def _model(self) -> Any:
        try:
            return build_meta(build_config(self._hf_config), "eager")
        except CapabilityError:
            return None

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Names in files by transformers' names, of tensors that are at most renamed."""
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
        from transformers.core_model_loading import (  # noqa: PLC0415
            WeightRenaming,
            rename_source_key,
        )

        if (model := self._model) is None:
            return {}
        transforms = get_model_conversion_mapping(model)
        renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
        own_names = dict.fromkeys(model.state_dict(), True)
        # By the rules of `from_pretrained` (transformers 5.23), without those that change tensors.
        return {
            rename_source_key(name, renamings, [], model.base_model_prefix, own_names)[0]: name
            for name in self._names
        }
