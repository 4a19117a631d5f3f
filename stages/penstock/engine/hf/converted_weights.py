"""Checkpoint files of models of the transformers backend, under the model's own names.

Files of published weights may name or divide tensors otherwise than the model's state dict, for
example one tensor for each expert. transformers knows how for each model type; its own operations
are applied here, to one group of tensors at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from penstock.core.errors import CapabilityError
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored, narrow
from penstock.engine.hf.state_dict import HFStateDict
from penstock.engine.quantization.dequantized_folder import DequantizedFolder, split_component
from penstock.engine.quantization.quantized_reader import RandomInitTensors
from penstock.models.automodel.build import build_config, build_meta
from penstock.models.automodel.weight_map import AutoWeightMap

# Begins the names of tensors that the model has in another form.
UNNAMED = "(in files) "


@dataclass
class _Group:
    """Tensors that one operation converts together, in order."""

    transform: Any
    # The first name of the result, by which the operation completes the others.
    name: str
    # Name of each source, and the pattern that it matched.
    sources: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def convert(self, tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        # A copy: `add_tensor` collects the tensors in the transform.
        transform = deepcopy(self.transform)
        for source, pattern in self.sources:
            transform.add_tensor(self.name, source, pattern, tensors[source])
        converted = transform.convert(self.name, model=model, config=model.config)
        # Some operations give a list of one tensor; transformers' own loader takes it out as well.
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


class ConvertedWeights:
    """A folder's tensors, converted to those of the model; a `TensorReader`.

    Tensors that are only renamed are read in boxes. Others are read and converted a group at a
    time, of which the last is kept.
    """

    def __init__(
        self,
        folder: SafetensorsFolder | DequantizedFolder,
        hf_config: Mapping[str, Any],
        names: AutoWeightMap,
    ) -> None:
        self._folder, self._names = folder, names
        self._hf_config = hf_config
        self._shapes = names.hf_shapes()
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None
        self._copies: list[tuple[str, str]] = []

    def stored(self, name: str) -> Stored:
        group = self._groups[name]
        if isinstance(group, str):
            tensor = self._folder.stored(group)
            changes = _changes_form(self._names, name)
            return replace(tensor, shape=self._shapes[name]) if changes else tensor
        first = self._folder.stored(group.sources[0][0])
        return Stored(self._shapes[name], first.dtype, first.start)

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        group = self._groups[name]
        if isinstance(group, str) and _changes_form(self._names, name):
            return narrow(_change_form(self._folder[group]), offsets, sizes)
        if isinstance(group, str):
            return self._folder.box(group, offsets, sizes)
        if self._last is None or self._last[0] != id(group):
            sources = {source: self._folder[source] for source, _ in group.sources}
            self._last = id(group), group.convert(sources, self._model)
        return narrow(self._last[1][name], offsets, sizes)

    def order(self, name: str) -> tuple[str, int]:
        group = self._groups[name]
        return self._folder.order(group if isinstance(group, str) else group.sources[0][0])

    def require(self, names: Iterable[str]) -> None:
        """Raise CapabilityError unless every name is a result of the folder's tensors."""
        self._folder.require(())
        if missing := sorted(name for name in names if name not in self._groups):
            raise CapabilityError(
                f"the weights have no tensor for {missing[0]}"
                + (f" and {len(missing) - 1} others" if len(missing) > 1 else "")
                + f" of {type(self._model).__name__}.\n"
                "  Name a folder with the complete weights of this model in model.model_path."
            )

    def sources(self) -> set[str]:
        sources: set[str] = set()
        for name in self._shapes:
            group = self._groups.get(name)
            if isinstance(group, _Group):
                sources.update(source for source, _ in group.sources)
            elif group:
                sources.add(group)
        return sources

    def copies(self) -> list[tuple[str, str]]:
        """The folder's tensors that the model ties to others of the folder, each with the other,
        which is read."""
        read = self._groups
        pairs = [(source, read[name]) for source, name in self._copies]
        return [
            (source, target)
            for source, target in pairs
            if isinstance(target, str) and target != source
        ]

    def renamed(self, folder: SafetensorsFolder) -> SafetensorsFolder:
        """The folder's tensors, with the model's names for those that are only renamed and for
        their components."""
        names = {
            group: name
            for name, group in self._groups.items()
            if isinstance(group, str) and not _changes_form(self._names, name)
        }

        def rename(stored: str) -> str:
            weight, component = split_component(stored)
            return names[weight] + component if weight in names else f"{UNNAMED}{stored}"

        return folder.renamed(rename)

    @cached_property
    def _model(self) -> Any:
        return _meta_model(self._hf_config)

    @cached_property
    def _groups(self) -> dict[str, _Group | str]:
        """The group of each of the model's tensors, or the name of the file's tensor."""
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
        from transformers.core_model_loading import (  # noqa: PLC0415
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        model = self._model
        transforms = get_model_conversion_mapping(model)
        renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        tied = self._names.config.outline.tied
        is_own = {**dict.fromkeys(self._shapes, True), **tied}
        sources: dict[str, _Group | str] = {}
        grouped: dict[str, _Group] = {}
        # Experts are stacked in the order in which their tensors are added.
        for source in sorted(self._folder.names(), key=_natural):
            name, pattern = rename_source_key(
                source, renamings, converters, model.base_model_prefix, is_own
            )
            if pattern is None:
                if (original := tied.get(name)) and original in self._shapes:
                    self._copies.append((source, original))
                    continue
                # A file may also have the model's own names.
                name = name if name in self._shapes else source
                if name in self._shapes:
                    sources.setdefault(name, source)
                continue
            group = grouped.setdefault(name, _Group(by_pattern[pattern], name))
            group.sources.append((source, pattern))
        for source, name in self._copies:
            sources.setdefault(name, source)
        for group in grouped.values():
            # On the meta device a conversion tells the names of its results without reading a file.
            meta = {
                source: torch.empty(self._folder.stored(source).shape, device="meta")
                for source, _ in group.sources
            }
            sources |= dict.fromkeys(group.convert(meta, model), group)
        return sources


class InitializedWeights(RandomInitTensors):
    """The random weights of a model without published ones, as its class initializes them from a
    seed. The whole model is in memory."""

    def __init__(self, hf_config: Mapping[str, Any], names: AutoWeightMap, seed: int) -> None:
        super().__init__(names, seed)
        self._hf_config, self._names = hf_config, names

    @cached_property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        from penstock.models.automodel.build import build_model  # noqa: PLC0415

        # The CPU's generator alone is used, so it alone has to be restored.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            attention = self._names.config.outline.traits.attention
            model = build_model(build_config(self._hf_config), attention)
        return {name: value.detach() for name, value in model.state_dict().items()}

    def initialized(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].float()
        return _change_form(tensor) if _changes_form(self._names, name) else tensor


def as_published(
    weights: HFStateDict, hf_config: Mapping[str, Any], names: AutoWeightMap
) -> HFStateDict:
    """The tensors under the names, and in the form, in which transformers saves the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
    )

    model = _meta_model(hf_config)
    # Legacy rules are for loading older files: reversed, they would write such names.
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    # Whether a prefix was removed on loading is not known; none is added.
    rules = [rule for rule in transforms if not isinstance(rule, PrefixChange)]
    # What loading does last, saving undoes first.
    reverse = [rule.reverse_transform() for rule in rules[::-1]]
    renamings = [rule for rule in reverse if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(weights.shapes, key=_natural):
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            renamed = apply_renamings(name, renamings)
            transform, pattern = WeightRenaming(name, renamed), name
        else:
            transform = by_pattern[pattern]
        group = groups.setdefault(renamed, _Group(transform, renamed))
        group.sources.append((name, pattern))
    shapes: dict[str, tuple[int, ...]] = {}
    owner: dict[str, _Group] = {}
    final: dict[int, dict[str, str]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for group in groups.values():
        meta = {
            name: _stored_form(names, name, torch.empty(weights.shapes[name], device="meta"))
            for name, _ in group.sources
        }
        own = final[id(group)] = {}
        for name, value in group.convert(meta, model).items():
            is_converter = isinstance(group.transform, WeightConverter)
            published = apply_renamings(name, renamings) if is_converter else name
            shapes[published], owner[published] = tuple(value.shape), group
            own[name] = published
            for source, _ in group.sources:
                if source in weights.dtypes:
                    dtypes[published] = weights.dtypes[source]
    last: dict[int, dict[str, torch.Tensor]] = {}

    def read(requested: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name in requested:
            group = owner[name]
            if id(group) not in last:
                sources = weights.read([source for source, _ in group.sources])
                sources = {
                    name: _stored_form(names, name, value) for name, value in sources.items()
                }
                last.clear()
                last[id(group)] = {
                    final[id(group)][published_name]: value
                    for published_name, value in group.convert(sources, model).items()
                }
            # Operations may return views, of which safetensors writes none that is not contiguous.
            tensors[name] = last[id(group)][name].contiguous()
        return tensors

    return HFStateDict(shapes, read, dtypes)


def _changes_form(names: AutoWeightMap, name: str) -> bool:
    outline = names.config.outline
    layer, _, leaf = name.rpartition(".")
    return name in outline.scalars or (leaf == "weight" and layer in outline.transposed)


def _change_form(tensor: torch.Tensor) -> torch.Tensor:
    """The model's form of a tensor in a file: [1] of a scalar, [out, in] of [in, out]."""
    return tensor.t() if tensor.dim() else tensor.reshape(1)


def _stored_form(names: AutoWeightMap, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not _changes_form(names, name):
        return tensor
    return tensor.t() if tensor.dim() == 2 else tensor.reshape(())


def _meta_model(hf_config: Mapping[str, Any]) -> Any:
    return build_meta(build_config(hf_config), "eager")


def _natural(name: str) -> list[tuple[int, int | str]]:
    from transformers.core_model_loading import dot_natural_key  # noqa: PLC0415

    return dot_natural_key(name)
