"""Markdown formatting of model cards; user-provided text is escaped."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.core.remote.urls import redact_text
from penstock.models.automodel.proved import audio_types, image_types
from penstock.models.multimodal import MULTIMODAL

MAX_LAYER_NAMES = 16  # Maximum number of layer names in one sentence

Prompting = Literal["chat", "text"]  # Whether the tokenizer has a chat template

_CHAT = """\
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)"""
_TEXT = """\
inputs = tokenizer("Hello!", return_tensors="pt")"""
_GENERATE = """\
output = model.generate(**inputs, max_new_tokens=64)
answer = output[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))"""

_MODEL = """\
from transformers import {auto_class}, AutoTokenizer

name = "."  # this folder, or the repository that holds it
tokenizer = AutoTokenizer.from_pretrained(name)
model = {auto_class}.from_pretrained(name, dtype="auto")"""
_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

name = "."  # this folder, or the repository that holds it
model = AutoPeftModelForCausalLM.from_pretrained(name, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained({tokenizer})"""
_MULTIMODAL_ADAPTER = """\
from peft import PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

name = "."  # this folder, or the repository that holds it
base = PeftConfig.from_pretrained(name).base_model_name_or_path
base_model = AutoModelForImageTextToText.from_pretrained(base, dtype="auto")
model = PeftModel.from_pretrained(base_model, name)
tokenizer = AutoTokenizer.from_pretrained({tokenizer})"""
_BASE_MODEL_OF_ADAPTER = 'model.peft_config["default"].base_model_name_or_path'


def code(text: str) -> str:
    """The text verbatim in a code span that is also valid within a table."""
    plain = " ".join(redact_text(text).split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""


def number(value: float) -> str:
    """Four significant digits, as `0.0123` or `5e-05`."""
    return f"{value:.4g}"


def count(number: int, singular: str, plural: str | None = None) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def section(title: str, *paragraphs: str) -> str:
    """A heading and paragraphs; empty without paragraphs."""
    texts = [paragraph for paragraph in paragraphs if paragraph]
    return "\n\n".join([f"## {title}", *texts]) if texts else ""


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; empty without rows."""
    if not rows:
        return ""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def pairs(rows: Mapping[str, str]) -> str:
    """A table of names and values, without empty values."""
    return table(("", ""), [(name, value) for name, value in rows.items() if value])


def describe_adapter(config: Mapping[str, Any]) -> str:
    """Describe an adapter_config.json: adapter type, rank, and target modules."""
    kind = "DoRA" if config.get("use_dora") else "LoRA"
    if config.get("use_rslora"):
        kind = f"rank-stabilized {kind}"
    text = f"{kind} of rank {config['r']}, alpha {number(config['lora_alpha'])}"
    if any(config.get(key) for key in ("rank_pattern", "alpha_pattern")):
        text += ", others for some layers"
    targets = config.get("target_modules") or []
    names = [targets] if isinstance(targets, str) else sorted(targets)
    names += sorted(config.get("target_parameters") or [])
    shown = [code(name) for name in names[:MAX_LAYER_NAMES]]
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown):,} others")
    text += f", on {', '.join(shown)}" if shown else ""
    biases = {"all": "all biases", "lora_only": "biases of these"}.get(config.get("bias", "none"))
    return f"{text}; {biases} trained too" if biases else text


def model_snippet(prompting: Prompting, model_type: str) -> str:
    """Snippet that loads the folder with transformers."""
    class_name = "CausalLM"
    if _takes_images(model_type):
        class_name = "ImageTextToText"
    elif model_type in audio_types():
        class_name = "MultimodalLM"
    return _snippet(_MODEL.format(auto_class=f"AutoModelFor{class_name}"), prompting)


def adapter_snippet(
    prompting: Prompting, model_type: str, tokenizer: Literal["here", "of the base", "in hf"]
) -> str:
    """Snippet that loads the folder with peft; `tokenizer` says which folder has the tokenizer."""
    paths = {"here": "name", "of the base": _BASE_MODEL_OF_ADAPTER, "in hf": '"../hf"'}
    loading = _MULTIMODAL_ADAPTER if _takes_images(model_type) else _ADAPTER
    return _snippet(loading.format(tokenizer=paths[tokenizer]), prompting)


def _takes_images(model_type: str) -> bool:
    # transformers loads these types with their vision part.
    return model_type in MULTIMODAL or model_type in image_types()


def _snippet(loading: str, prompting: Prompting) -> str:
    asking = _CHAT if prompting == "chat" else _TEXT
    return f"```python\n{loading}\n\n{asking}\n{_GENERATE}\n```"
