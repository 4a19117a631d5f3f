"""The exported model of a run, loaded with transformers and, for an adapter, with peft."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from penstock.core.errors import ConfigError
from penstock.evaluate.folder import read_base_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

AdapterForm = Literal["merged", "peft"]
"""An adapter as part of the weights, or laid over its base."""


def load_exported(
    export: Path, folders: dict[str, str], adapter: AdapterForm | None, **options: Any
) -> "tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]":
    """The model and tokenizer of the export in `export`, whose facts list `folders`.

    `adapter` None takes the merged model if the export has one. `options` go to `from_pretrained`.
    Raises ConfigError for an adapter that the run does not have, and CapabilityError where a
    package that loads the folder is not installed.
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
    # A run that also exports the merged model writes the tokenizer there alone.
    named = export / folders.get("hf", folders.get("adapter", "hf"))
    return model.eval(), AutoTokenizer.from_pretrained(named)
