"""Axolotl: data sets, whose `type` says what they hold."""

import re
from collections.abc import Mapping
from typing import Any, cast

from penstock.config.translate.dialect import Rule, listed
from penstock.config.translate.translation import Entry

TYPES: Mapping[str, Mapping[str, str]] = {
    "chat_template": {"type": "chat"},
    "sharegpt": {"type": "sharegpt"},
    "alpaca": {"type": "alpaca"},
    "alpaca_w_system.load_open_orca": {"type": "alpaca", "field_system": "system_prompt"},
    "completion": {"type": "text"},
    "pretrain": {"type": "text"},
    "context_qa": {"type": "instruction"},
    "chat_template.default": {"type": "preference"},
    "chat_template.argilla": {"type": "preference"},
    "chatml.intel": {"type": "preference", "field_prompt": "question"},
    "llama3.intel": {"type": "preference", "field_prompt": "question"},
    "chatml.prompt_pairs": {"type": "preference"},
    "llama3.prompt_pairs": {"type": "preference"},
}

KTO_TYPES: Mapping[str, Mapping[str, str]] = {
    "chatml.argilla": {"type": "kto"},
    "llama3.argilla": {"type": "kto"},
    "user_defined.default": {"type": "kto"},
}

SAME_NAMES = {
    "path": "path",
    "name": "name",
    "split": "split",
    "revision": "revision",
    "data_files": "data_files",
    "ds_type": "ds_type",
    "shards": "shards",
    "shards_idx": "shards_idx",
    "preprocess_shards": "preprocess_shards",
    "field_messages": "field_messages",
    "field_tools": "field_tools",
    "field_chosen": "field_chosen",
    "field_rejected": "field_rejected",
    "field": "field_text",
}
"""What a data set says besides, which has these names here."""

IDLE = ("chat_template", "trust_remote_code", "message_field_role", "message_field_content")
USUAL: Mapping[str, Any] = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "train_on_eos": ("turn", "last", "all"),
    "message_property_mappings": ({"role": "role", "content": "content"},),
}
"""What is meant here anyway."""


def sources(name: str) -> Rule:
    """The rule of a list of data sets."""

    def rule(entry: Entry) -> None:
        told: list[str] = []
        parts = [
            cast("dict[str, Any]", one) for one in listed(entry.value) if isinstance(one, dict)
        ]
        entry.put(name, [_source(entry, part, told) for part in parts])
        if told and entry.line.kind != "refused":
            entry.approximated("; ".join(dict.fromkeys(told)))

    return rule


def _source(entry: Entry, part: Mapping[str, Any], told: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {SAME_NAMES[key]: part[key] for key in part if key in SAME_NAMES}
    found |= _columns(entry, part, told)
    for key, value in part.items():
        if key in SAME_NAMES or key == "type" or value is None:
            continue
        if key in IDLE:
            told.append("the tokenizer's own chat template is used")
        elif key not in USUAL or value not in USUAL[key]:
            told.append(f"{key} of a data set is left out")
    return found


def _columns(entry: Entry, part: Mapping[str, Any], told: list[str]) -> Mapping[str, str]:
    kind: Any = part.get("type")
    rl = entry.get("rl")
    if isinstance(kind, dict):
        return _own(entry, cast("dict[str, Any]", kind), told)
    known = KTO_TYPES if rl == "kto" else TYPES
    if kind in known:
        found = known[kind]
    elif kind is None and "data_files" not in part and rl is None:
        return {"type": "tokenized"}
    elif rl in (None, "") and (base := re.split(r"[.:]", str(kind))[0]) in known:
        found = known[base]
    else:
        entry.refuse(f"type: {kind} of a data set; there are {', '.join(known)}")
        return {}
    if rl in ("dpo", "ipo", "simpo", "orpo") and found["type"] == "chat":
        return {"type": "preference"}
    if found["type"] == "alpaca":
        told.append("the tokenizer's chat template, if any, renders questions")
    return found


def _own(entry: Entry, kind: Mapping[str, Any], told: list[str]) -> dict[str, str]:
    """Columns of a form that the file describes itself."""
    names = ("field_instruction", "field_input", "field_output", "field_system")
    prefers = entry.get("rl") not in (None, "", "kto")
    if prefers:
        names = ("field_prompt", "field_chosen", "field_rejected", "field_system")
    found = {name: str(kind[name]) for name in names if kind.get(name)}
    if any(name.endswith("format") or name == "system_prompt" for name in kind):
        told.append("the tokenizer's chat template renders texts, not a format")
    return {"type": "preference" if prefers else "instruction", **found}


def too_long(entry: Entry) -> None:
    """`excess_length_strategy`: what becomes of samples above `sequence_len`."""
    if entry.value in ("drop", "truncate"):
        entry.put("data.truncation_mode", "drop" if entry.value == "drop" else "keep_start")
    else:
        entry.refuse("it takes drop and truncate")
