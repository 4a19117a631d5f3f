"""Model card of `penstock merge`: base model and merged adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.files import read_json_object
from penstock.export.base_model import BaseModel, read_model_folder
from penstock.export.card import describe_base, describe_license, front_matter, heading, save_card
from penstock.export.card_text import code, count, describe_adapter, model_snippet, pairs, section
from penstock.export.license import copy_license_files
from penstock.export.lineage import has_chat_template


def write_merged_card(
    out: Path, base: Path, adapter: Path, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Write README.md to `out`, the model in `base` merged with the adapter in `adapter`.

    `config` is the adapter_config.json, `facts` are those of the merge. The license texts of both
    are copied; if names collide, the base model's is used.
    """
    start, adapter_model = read_model_folder(base), read_model_folder(adapter)
    prompting = "chat" if has_chat_template(out) else "text"
    model_type = read_json_object(out / "config.json").get("model_type")
    body = [
        heading(f"{_short_name(start)} with {_short_name(adapter_model)}"),
        pairs(_summary(start, adapter_model, config, facts)),
        section("Use", model_snippet(prompting, str(model_type))),
    ]
    data = front_matter(
        start, "finetune", library_name="transformers", tags=["penstock", "lora", "merged"]
    )
    save_card(out, data, "\n\n".join(body))
    for folder in (base, adapter):
        copy_license_files(folder, out)


def _summary(
    start: BaseModel, adapter_model: BaseModel, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, str]:
    return {
        "base model": describe_base(start),
        "adapter": describe_base(adapter_model),
        "adapter type": describe_adapter(config),
        "merged into": f"{facts['changed']:,} of {count(facts['tensors'], 'tensor')}",
        "license": describe_license(start),
        "license of the adapter": code(adapter_model.license.display_name)
        if adapter_model.license
        else "",
    }


def _short_name(model: BaseModel) -> str:
    return model.name.rpartition("/")[2]
