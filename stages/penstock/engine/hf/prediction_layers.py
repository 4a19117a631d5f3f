"""Multi-token prediction: tensors of layers that predict further tokens. An export has those of the
base model, byte for byte, where they are not trained."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.state_dict import HFStateDict, Tensors, from_reader
from penstock.engine.hf.weight_files import prediction_tensors
from penstock.engine.quantization.prequantized import PrequantizedFormat
from penstock.engine.quantization.quantized_reader import QuantizeOnLoad
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig
from penstock.models.multimodal import TEXT_CONFIG
from penstock.models.names import HEAD_WEIGHT

# Fields of config.json that count the layers.
COUNTS = {"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"}


def trained_in(tensors: Tensors, family: Family, hf_config: HfConfig) -> bool:
    """Whether a training checkpoint has layers that predict further tokens."""
    if family.mtp is None:
        return False
    layer = family.read(hf_config).num_hidden_layers
    return f"{family.mtp.eh_proj.format(layer=layer)}.weight" in tensors.shapes()


def copies_of_ends(config: DecoderConfig) -> dict[str, str]:
    """Names of tensors that predict further tokens and are copies, and of what they are copies."""
    if config.mtp is None:
        return {}
    head = config.names.embedding if config.tie_word_embeddings else HEAD_WEIGHT
    sources: dict[str, str] = {}
    for layer in range(config.num_hidden_layers, config.num_layers):
        sources[config.mtp.names.embedding.format(layer=layer)] = config.names.embedding
        sources[config.mtp.names.head.format(layer=layer)] = head
    # Families without a copy of their own have no name for it.
    sources.pop("", None)
    return sources


def without_prediction_layers(hf_config: HfConfig, family: Family) -> dict[str, Any]:
    """The config.json of the model without them."""
    if text := hf_config.get(TEXT_CONFIG):
        return {**hf_config, TEXT_CONFIG: without_prediction_layers(text, family)}
    default = {family.mtp.count} if family.mtp else set[str]()
    return {**hf_config, **dict.fromkeys((COUNTS & hf_config.keys()) | default, 0)}


def describe_prediction_layers(weights: Path, num_layers: int) -> str | None:
    """What becomes of those in a folder, in one line; None without any."""
    with SafetensorsFolder(weights) as folder:
        names = prediction_tensors(folder.names(), num_layers)
    if not names:
        return None
    return (
        f"model: {len(names)} tensors that predict further tokens ({names[0]}, ...) are not "
        "trained; exports have the base model's"
    )


def prediction_layers(
    folder: SafetensorsFolder, names: Sequence[str], published: PrequantizedFormat | None
) -> HFStateDict:
    """These tensors as the folder has them; quantized matrices are dequantized, as exports are."""
    matrices: list[str] = []
    if published:
        weights = {f"{name.partition('.weight')[0]}.weight" for name in names if ".weight" in name}
        matrices = sorted(name for name in weights if published.reader.is_quantized(folder, name))
    reader = QuantizeOnLoad(folder, {}, published, torch.device("cpu"), folder)
    plain = [
        name for name in names if not name.startswith(tuple(f"{matrix}_" for matrix in matrices))
    ]
    shapes = {name: reader.stored(name).shape for name in sorted({*plain, *matrices})}
    dtypes = {name: folder.stored(name).dtype for name in plain if name not in matrices}
    return from_reader(reader, shapes, dtypes)


def with_copies(weights: HFStateDict, copies: Mapping[str, str]) -> HFStateDict:
    """These tensors, and copies of them by name, which are saved in the dtype of the export."""
    return weights.joined(replace(weights.renamed(copies), dtypes={}))
