"""Our adapters in the form the PEFT library reads and writes."""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.adapters.names import SIDES, factor_of, native_name

PREFIX = "base_model.model."


def peft_name(native: str) -> str:
    """The name in `adapter_model.safetensors` of the factor with this native name."""
    factor = factor_of(native)
    assert factor is not None, f"{native} is not the name of a low-rank factor"
    return f"{PREFIX}{factor.hf_module}.{factor.side}.weight"


def from_peft_name(name: str, fused_parts: frozenset[str] = frozenset()) -> str | None:
    """The native name of a tensor in `adapter_model.safetensors`; None if it is not a plain factor.

    `fused_parts` are the last names of the layers that the model keeps in one (`q_proj`, …).
    """
    for side in SIDES:
        end = f".{side}.weight"
        if name.startswith(PREFIX) and name.endswith(end):
            return native_name(name[len(PREFIX) : -len(end)], side, fused_parts)
    return None


def adapter_config(
    *,
    rank: int,
    alpha: float,
    adapted: Sequence[str],
    linear_layers: Iterable[str],
    base_model: str,
    revision: str | None = None,
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    `adapted` are the adapted layers' names in a checkpoint, as `inject` returns them, and
    `linear_layers` all that it has: a last name (`q_proj`) stands for its layers where all of them
    are adapted, and they are listed one by one where only some are.
    """
    chosen = set(adapted)
    untouched = {name.rpartition(".")[2] for name in linear_layers if name not in chosen}
    targets = {name if (last := name.rpartition(".")[2]) in untouched else last for name in adapted}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
