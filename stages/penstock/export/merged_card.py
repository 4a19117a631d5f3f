"""Model card of `penstock merge`: base model and merged adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.export.base_model import BaseModel, base_in
from penstock.export.card import describe_base, front_matter, heading, licence_told, save_card
from penstock.export.card_text import adapter_told, code, count, pairs, section, use_of_model
from penstock.export.licence import pass_on
from penstock.export.lineage import has_chat_template


def write_merged_card(
    out: Path, base: Path, adapter: Path, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Write README.md to `out`, the model in `base` merged with the adapter in `adapter`.

    `config` is the adapter_config.json, `facts` are those of the merge. The license texts of both
    are copied; if names collide, the base model's is used.
    """
    start, merged = base_in(base), base_in(adapter)
    body = [
        heading(f"{_short(start)} with {_short(merged)}"),
        pairs(_told(start, merged, config, facts)),
        section("Use", use_of_model("chat" if has_chat_template(out) else "text")),
    ]
    data = front_matter(
        start, "finetune", library_name="transformers", tags=["penstock", "lora", "merged"]
    )
    save_card(out, data, "\n\n".join(body))
    for folder in (base, adapter):
        pass_on(folder, out)


def _told(
    start: BaseModel, merged: BaseModel, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, str]:
    return {
        "base model": describe_base(start),
        "adapter": describe_base(merged),
        "kind of adapter": adapter_told(config),
        "adapted": f"{facts['changed']:,} of {count(facts['tensors'], 'tensor')}",
        "licence": licence_told(start),
        "the adapter's own": code(merged.licence.spoken) if merged.licence else "",
    }


def _short(model: BaseModel) -> str:
    return model.name.rpartition("/")[2]
