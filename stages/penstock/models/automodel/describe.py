"""Computes the outline of a transformers model from its meta-device model."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.core.errors import CapabilityError
from penstock.models.automodel.build import build_config, build_meta, is_multimodal
from penstock.models.automodel.media.absent_tower import has_absent_tower
from penstock.models.automodel.media.traits import find_media_traits
from penstock.models.automodel.normalize import (
    normalize,
    scalars,
    transposed_layers,
)
from penstock.models.automodel.outline import STACKED, ModelOutline, Shape
from penstock.models.automodel.routers import layer_indices, router_modules
from penstock.models.automodel.saved_activations import saved_activations
from penstock.models.automodel.traits import EXPERTS, find_traits, first_size

# Parts of the names of towers, by modality.
TOWERS = {"image": "vision", "audio": "audio_tower"}

EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
)


def describe(hf_config: Mapping[str, Any]) -> ModelOutline:
    """The outline of the model of a config.json. Builds it on the meta device, and runs a tiny one.

    Raises CapabilityError for a model that cannot be trained, with the reason.
    """
    config = build_config(hf_config)
    media = None
    if is_multimodal(config):
        traits, media = find_media_traits(hf_config)
    else:
        traits = find_traits(hf_config)
    model = build_meta(config, traits.attention)
    stacked = stacked_experts(model)
    changed = {
        "scalars": tuple(scalars(model)),
        "transposed": tuple(transposed_layers(model)),
    }
    normalize(model)
    params: dict[str, Shape] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    modules = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    text = config.get_text_config(decoder=True) if media else config
    decoder = decoder_name(model, modules) if media else ""
    if media:
        media = replace(
            media,
            language=language_parts(model, modules, decoder),
            vision=tower_parts(model, modules),
            absent=has_absent_tower(config),
        )
    layers = tuple(repeated_layers(model.get_submodule(decoder), decoder))
    routers = layer_indices(router_modules(model), layers) if traits.scoring else {}
    if traits.scoring and not routers:
        traits = replace(traits, scoring=None, routers_why="its routers are not one in a layer")
    # The final norm is the only one beside the layers.
    children = model.base_model.children()
    norms = [child for child in children if "norm" in type(child).__name__.lower()]
    fp32_modules = set(model._keep_in_fp32_modules_strict or ())
    rates = (v for k, v in config.to_dict().items() if "dropout" in k or k.endswith("_pdrop"))
    aux_loss_coef = 0.0
    if getattr(text, "output_router_logits", False):
        aux_loss_coef = float(getattr(text, "router_aux_loss_coef", None) or 0.0)
    return ModelOutline(
        architecture=type(model).__name__,
        params=params,
        **changed,
        tied=_tied(model),
        layers=layers,
        linear={
            name: (module.weight.shape[0], module.weight.shape[1])
            for name, module in model.named_modules()
            if type(module) is nn.Linear and (media is None or name.startswith(media.language))
        },
        fp32=tuple(name for name in params if fp32_modules & {*name.split(".")}),
        embedding=modules[id(model.get_input_embeddings())],
        head="" if head is None else modules[id(head)],
        norm=modules[id(norms[0])] if len(norms) == 1 else "",
        experts_per_token=first_size(text, EXPERTS_PER_TOKEN),
        num_experts=first_size(text, EXPERTS),
        stacked=stacked,
        replaceable_experts=all(
            # transformers' use_experts_implementation decorates the class of these experts.
            hasattr(model.get_submodule(name.rpartition(".")[0]), "_is_expert_parallel")
            for name in stacked
        ),
        routers=routers,
        aux_loss_coef=aux_loss_coef,
        dropout=any(isinstance(rate, float) and rate > 0 for rate in rates),
        traits=traits,
        saved=saved_activations(lambda: build_meta(config, traits.attention), layers),
        media=media,
    )


def decoder_name(model: Any, modules: Mapping[int, str]) -> str:
    """The name of a multimodal model's decoder."""
    decoder = model.get_decoder()
    name = modules.get(id(decoder), "")
    if not name or decoder is model.base_model:
        raise CapabilityError(f"{type(model).__name__} does not say which part is its decoder.")
    return name


def language_parts(model: Any, modules: Mapping[int, str], decoder: str) -> tuple[str, ...]:
    """The beginnings of the names of what is neither a tower nor the projector."""
    parts = [decoder, modules[id(model.get_input_embeddings())]]
    if (head := model.get_output_embeddings()) is not None:
        parts.append(modules[id(head)])
    return tuple(dict.fromkeys(f"{name}." for name in parts))


def tower_parts(model: Any, modules: Mapping[int, str]) -> tuple[str, ...]:
    """The beginnings of the names of the towers of images and audio."""
    towers: list[str] = []
    for modality, part in TOWERS.items():
        tower = model.get_encoder(modality=modality)
        name = modules.get(id(tower), "")
        if not name or tower is model.base_model:
            named = (n for n, _ in model.named_modules() if part in n.rpartition(".")[2])
            name = next(named, "")
        if name:
            towers.append(f"{name}.")
    return tuple(towers)


def repeated_layers(model: Any, prefix: str = "") -> Iterator[str]:
    """The names of the model's repeated layers, in order: the outermost modules of the classes in
    its `_no_split_modules`, or else the longest module list. Layers that share a parameter with
    another module are left out: FSDP shards it with the root."""
    class_names = set(getattr(model, "_no_split_modules", None) or ())
    named_layers = [
        name for name, module in model.named_modules() if type(module).__name__ in class_names
    ]
    if not named_layers:
        lists = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
        ]
        name, longest = max(lists, key=lambda item: len(item[1]), default=("", ()))
        named_layers = [f"{name}.{number}" for number in range(len(longest))]
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    outer = ""
    for name in named_layers:
        layer = model.get_submodule(name)
        if outer and name.startswith(f"{outer}."):
            continue
        if (
            name
            and all(uses[id(parameter)] == 1 for parameter in layer.parameters())
            and layer is not getattr(model, "base_model", None)
        ):
            outer = name
            yield f"{prefix}.{name}" if prefix else name


def stacked_experts(model: nn.Module) -> dict[str, bool]:
    """The three-dimensional parameters of modules called `experts`, and whether they are
    transposed, as PEFT reads both; none if the numbers of experts differ."""
    transposed: dict[str, bool] = {}
    sizes: set[int] = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        for leaf in STACKED:
            parameter = module._parameters.get(leaf)
            if parameter is not None and parameter.dim() == 3:
                transposed[f"{name}.{leaf}"] = bool(getattr(module, "is_transposed", False))
                sizes.add(parameter.shape[0])
    return transposed if len(sizes) == 1 else {}


def _tied(model: nn.Module) -> dict[str, str]:
    # Every further name of a parameter, and its first one.
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied
