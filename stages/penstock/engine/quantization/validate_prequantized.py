"""Check a run's settings against a pre-quantized checkpoint. No torch here.

Its codes are used unchanged: rounding them to other levels would lose precision twice.
"""

from penstock.core.errors import ConfigError
from penstock.engine.model_source import QuantizationArgs
from penstock.models.quantization_config import QuantizationConfig


def validate_prequantized(
    quantizing: QuantizationArgs | None, declared: QuantizationConfig
) -> None:
    """Raise ConfigError for settings that such a checkpoint cannot be used with.

    `quantizing` is None for a run without QLoRA, which dequantizes the weights as it reads them.
    """
    if quantizing is None:
        return
    kind = f"{declared.format} ({declared.quant_method})"
    instead = (
        "as it is.\n  Leave {} out, or name the model that it was quantized from as "
        "model.model_path."
    )
    if quantizing.format not in (None, declared.format):
        raise ConfigError(
            f"lora.quant_format is {quantizing.format}, and the model is published in {kind}, "
            f"which is used {instead.format('quant_format')}"
        )
    # bitsandbytes stores the block size with each matrix.
    is_said = declared.group_size is not None or declared.quant_method != "bitsandbytes"
    if is_said and quantizing.group not in (None, declared.group_size):
        has = f"groups of {declared.group_size}" if declared.group_size else "a scale for each row"
        raise ConfigError(
            f"lora.quant_group_size is {quantizing.group}, and the model is published in {kind} "
            f"with {has}, which is used {instead.format('quant_group_size')}"
        )
