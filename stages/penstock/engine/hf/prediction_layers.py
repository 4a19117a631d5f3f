"""Multi-token prediction: layers after the last of the decoder, which predict further tokens
(`num_nextn_predict_layers`). They are not trained; an export has those of the base model."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.state_dict import HFStateDict
from penstock.engine.quantization.prequantized import PrequantizedFormat
from penstock.engine.quantization.quantized_reader import QuantizeOnLoad

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def num_prediction_layers(hf_config: Mapping[str, Any]) -> int:
    """How many layers a config.json has after those of the decoder."""
    return hf_config.get("num_nextn_predict_layers") or 0


def describe_prediction_layers(hf_config: Mapping[str, Any]) -> str | None:
    """What becomes of them, in one line; None without any."""
    if not (count := num_prediction_layers(hf_config)):
        return None
    first, more = hf_config["num_hidden_layers"], "" if count == 1 else "s"
    return (
        f"model: {count} layer{more} from {first} on predict{'s' if count == 1 else ''} further "
        "tokens (num_nextn_predict_layers), not trained; exports have the base model's"
    )


def prediction_layers(
    folder: SafetensorsFolder, num_layers: int, published: PrequantizedFormat | None
) -> HFStateDict:
    """The tensors of these layers as the folder has them; quantized matrices are dequantized, as
    exports are."""
    names = [name for name in folder.names() if _number(name) >= num_layers]
    matrices = _quantized(folder, names, published)
    reader = QuantizeOnLoad(folder, {}, published, torch.device("cpu"))
    plain = [name for name in names if not name.startswith(tuple(f"{one}_" for one in matrices))]
    shapes = {name: reader.stored(name).shape for name in sorted({*plain, *matrices})}

    def read(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: reader.box(name, (0,) * len(shapes[name]), shapes[name]) for name in wanted}

    dtypes = {name: folder.stored(name).dtype for name in plain if name not in matrices}
    return HFStateDict(shapes, read, dtypes)


def with_tensors(weights: HFStateDict, others: HFStateDict) -> HFStateDict:
    """Both together."""

    def read(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        own = weights.read([name for name in wanted if name in weights.shapes])
        return own | others.read([name for name in wanted if name in others.shapes])

    shapes = {**weights.shapes, **others.shapes}
    return HFStateDict(shapes, read, {**weights.dtypes, **others.dtypes})


def _number(name: str) -> int:
    found = LAYER.match(name)
    return int(found[1]) if found else -1


def _quantized(
    folder: SafetensorsFolder, names: Sequence[str], published: PrequantizedFormat | None
) -> list[str]:
    """The weights among these names that are stored quantized."""
    if published is None:
        return []
    weights = {f"{name.partition('.weight')[0]}.weight" for name in names if ".weight" in name}
    return sorted(name for name in weights if published.is_quantized(folder, name))
