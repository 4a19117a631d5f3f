"""Loads the exported model of a run with transformers and, for an adapter, with peft."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from penstock.core.errors import ConfigError
from penstock.evaluate.folder import read_base_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

AdapterForm = Literal["merged", "peft"]
"""merged: as part of the weights; peft: as a PeftModel on the base model."""


def load_exported(
    export: Path, folders: dict[str, str], adapter: AdapterForm | None, **options: Any
) -> "tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]":
    """Load the model and tokenizer of the export in `export`, whose facts list `folders`.

    With `adapter` None the merged model is loaded if the export has one. `options` go to
    `from_pretrained`. Raises ConfigError for an adapter that the run does not have, and
    CapabilityError if a required package is not installed.
    """
    if adapter == "peft" and "adapter" not in folders:
        raise ConfigError(
            "adapter is 'peft', and this run trains no adapter (lora.enable_lora is false).\n"
            "  Leave adapter out."
        )
    is_whole = "hf" in folders and adapter != "peft"
    folder = export / folders["hf" if is_whole else "adapter"]
    base = read_base_model(folder)
    options = {"dtype": "auto", **options}
    model: Any = AutoModelForCausalLM.from_pretrained(base or folder, **options)
    if base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
        if adapter == "merged":
            model = model.merge_and_unload()
    # A run that also exports the merged model writes the tokenizer only there.
    tokenizer = AutoTokenizer.from_pretrained(export / (folders.get("hf") or folders["adapter"]))
    return model.eval(), tokenizer
