"""Axolotl: data sets, whose `type` says what they hold."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, cast

from penstock.config.translate import rule
from penstock.config.translate.dialect import Table, by_reason, listed, same_names
from penstock.config.translate.shared import SOURCES, TESTS
from penstock.config.translate.templates import template_of_dataset
from penstock.config.translate.translate_key import translate_items
from penstock.config.translate.translation import Entry

# Types of a data set to ours, with the columns that they read.
TYPES: Mapping[str, Mapping[str, str]] = {
    "chat_template": {"type": "chat"},
    "messages.chat": {"type": "chat"},
    "sharegpt": {"type": "sharegpt"},
    "alpaca": {"type": "alpaca"},
    "alpaca_instruct": {"type": "alpaca"},
    "alpaca_w_system": {"type": "alpaca", "field_system": "system"},
    "completion": {"type": "text"},
    "pretrain": {"type": "text"},
    "gpteacher": {"type": "alpaca", "field_output": "response"},
    "context_qa": {"type": "instruction"},
    "context_qa.load_v2": {
        "type": "instruction",
        "field_instruction": "question",
        "field_input": "context",
        "field_output": "answer",
    },
    **{
        name: {"type": "instruction", "field_instruction": question, "field_output": answer}
        for name, question, answer in (
            ("alpaca_chat.load_qa", "question", "answer"),
            ("alpaca_chat.load_camel_ai", "message_1", "message_2"),
            ("oasst", "INSTRUCTION", "RESPONSE"),
            ("summarizetldr", "article", "summary"),
            ("gpt4all", "prompt", "response"),
            ("jeopardy", "question", "answer"),
        )
    },
    **{
        f"alpaca_w_system.{name}": {
            "type": "instruction",
            "field_instruction": "question",
            "field_output": "response",
            "field_system": "system_prompt",
        }
        for name in ("load_open_orca", "load_open_orca_chatml")
    },
}

FAMILIES = ("chat_template", "chatml", "llama3", "zephyr", "user_defined", "passthrough")
PROMPTS: Mapping[str, Mapping[str, str]] = {
    **{name: {} for name in ("default", "argilla", "argilla_chat", "prompt_pairs", "ultra")},
    "icr": {"field_prompt": "input"},
    "intel": {"field_prompt": "question"},
}
PREFERENCE_TYPES: Mapping[str, Mapping[str, str]] = {
    **{f"{of}.{name}": prompt for of in FAMILIES for name, prompt in PROMPTS.items()},
    **{name: {} for name in ("passthrough", "chat_template")},
}
KTO_TYPES: Mapping[str, Mapping[str, str]] = {
    **PREFERENCE_TYPES,
    **{f"{of}.argilla": {"field_prompt": "instruction"} for of in ("chatml", "llama3")},
}

RENDERED: Mapping[str, str] = {
    "alpaca": "the tokenizer's chat template, if any, renders questions",
    "jeopardy": "the category is not part of the question, and answers do not begin with 'what is'",
}

NAMES_OF_ROLES = {"human": "user", "gpt": "assistant"}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
USUAL_KEYS, SHAREGPT_KEYS = ("role", "content"), ("from", "value")

# Keys of a message under which reasoning is read.
REASONING = ("reasoning_content", "reasoning", "thinking")


def sources(entry: Entry) -> None:
    """A list of data sets."""

    name = TESTS if entry.key == "test_datasets" else SOURCES
    if entry.key == "datasets" and not all(isinstance(i, dict) for i in listed(entry.value)):
        raise TypeError("it takes mappings with a path")
    items: list[dict[str, Any]] = [
        item if isinstance(item, dict) else {"path": item} for item in listed(entry.value)
    ]
    entry.put(name, [{} for _ in items])
    translate_items(entry, items, TABLE, name)
    for index, source in enumerate(entry.draft.value(name)):
        if "type" not in items[index] and "data_files" not in items[index]:
            entry.put(f"{name}.{index}.type", "tokenized")
        if source.get("type") == "sharegpt":
            source.setdefault("field_messages", "messages")


def _prefers(entry: Entry) -> bool:
    return entry.get("rl") not in (None, "", "kto")


def _message_keys(item: Mapping[str, Any]) -> tuple[str, str]:
    keys: Mapping[str, str] = item.get("message_property_mappings") or {}
    role = item.get("message_field_role") or keys.get("role") or USUAL_KEYS[0]
    return role, item.get("message_field_content") or keys.get("content") or USUAL_KEYS[1]


def _type(entry: Entry) -> None:
    kind: Any = entry.value
    rl = entry.get("rl")
    if isinstance(kind, dict):
        _own_columns(entry, cast("dict[str, Any]", kind))
        return
    types = KTO_TYPES if rl == "kto" else PREFERENCE_TYPES if _prefers(entry) else TYPES
    base = re.split(r"[.:]", str(kind))[0]
    name = kind if kind in types else base
    if name not in types or (name == base != kind and rl):
        near = difflib.get_close_matches(str(kind), types, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(types)}"
        entry.refuse(f"{str(kind)[:40]!r} has no counterpart; {hint}")
        return
    preferred = {"type": "kto" if rl == "kto" else "preference"} if rl else {}
    columns = {**preferred, **types[name]}
    if columns["type"] == "chat" and _message_keys(entry.beside) == SHAREGPT_KEYS:
        columns["type"] = "sharegpt"
    for column, value in columns.items():
        entry.put(column, value)
    if why := RENDERED.get(name, RENDERED.get(columns["type"])):
        entry.approximated(why)


def _own_columns(entry: Entry, kind: Mapping[str, Any]) -> None:
    # Columns of a form that the file describes itself.
    kto = entry.get("rl") == "kto"
    entry.put("type", "kto" if kto else "preference" if _prefers(entry) else "instruction")
    fields = ("field_instruction", "field_input", "field_output", "field_system")
    if _prefers(entry):
        fields = ("field_prompt", "field_chosen", "field_rejected", "field_system")
    elif kto:
        fields = ("field_prompt", "field_completion", "field_label", "field_system")
    for name in fields:
        if kind.get(name):
            entry.put(name, str(kind[name]))
    if unread := [name for name, value in kind.items() if value and name not in fields]:
        entry.approximated(
            f"{', '.join(unread)}: the tokenizer's chat template renders texts, not a format"
        )


def _keys_of_messages(entry: Entry) -> None:
    # `message_property_mappings`, `message_field_role` and `message_field_content`.
    keys = _message_keys(entry.beside)
    if keys == USUAL_KEYS:
        entry.no_effect("these keys are read anyway")
    elif keys == SHAREGPT_KEYS:
        entry.decides(f"{entry.into}type")
    else:
        entry.put("field_message_role", keys[0])
        entry.put("field_message_content", keys[1])
    mappings = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
    if unread := [
        f"{name}: {key}"
        for name, key in mappings.items()
        if name not in USUAL_KEYS and key != name and not (name in REASONING and key in REASONING)
    ]:
        entry.leave_out(f"messages have their own names of {', '.join(unread)}")


def _roles(entry: Entry) -> None:
    roles: dict[str, list[str]] = entry.value
    if unknown := [role for role in roles if role not in KNOWN_ROLES]:
        entry.leave_out(f"there is no role {', '.join(unknown)}")
    new = {
        role: [name for name in listed(names) if name != role and NAMES_OF_ROLES.get(name) != role]
        for role, names in roles.items()
        if role in KNOWN_ROLES
    }
    if any(new.values()):
        entry.put("message_roles", {role: names for role, names in new.items() if names})
    elif not unknown:
        entry.no_effect("these names are known")


def _trained_roles(entry: Entry) -> None:
    roles = list(dict.fromkeys(NAMES_OF_ROLES.get(role, role) for role in listed(entry.value)))
    if roles and roles != ["assistant"]:
        entry.put("roles_to_train", roles)
    else:
        (entry.no_effect if roles else entry.leave_out)("answers of the assistant are trained")


def _trained_ends(entry: Entry) -> None:
    # `train_on_eot`, and `train_on_eos` unless the other one is written.
    train_on_eot = entry.beside.get("train_on_eot") if entry.key.endswith("train_on_eos") else None
    if train_on_eot not in (None, entry.value):
        entry.approximated("train_on_eot says which tokens that end turns are trained")
    elif entry.value == "turn":
        entry.no_effect("the ends of trained turns are trained")
    else:
        entry.put("train_on_eos", entry.value)


def _reasoning_key(entry: Entry) -> None:
    report = entry.no_effect if entry.value in REASONING else entry.leave_out
    report(f"reasoning is read under {', '.join(REASONING)}")


# The keys of a data set.
TABLE = Table(
    same={
        **same_names(
            "",
            "path name split revision data_files ds_type shards shards_idx preprocess_shards"
            " field_messages field_tools field_chosen field_rejected drop_system_message"
            " field_system",
        ),
        "field": "field_text",
        "text_column": "field_text",
        "message_field_training": "field_message_training",
        "message_field_training_detail": "field_message_training_detail",
    },
    computed={
        "type": _type,
        **dict.fromkeys(
            ("message_property_mappings", "message_field_role", "message_field_content"),
            _keys_of_messages,
        ),
        "roles": _roles,
        "roles_to_train": _trained_roles,
        **dict.fromkeys(("train_on_eos", "train_on_eot"), _trained_ends),
        **dict.fromkeys(("chat_template", "chat_template_jinja"), template_of_dataset),
        **dict.fromkeys(("field_thinking", "template_thinking_key"), _reasoning_key),
        "conversation": rule.no_effect("the chat template renders conversations"),
    },
    unsupported=by_reason(
        """
        trust_remote_code: loading scripts of data sets are not run
        split_thinking: put reasoning into reasoning_content of messages
        logprobs_field temperature: models are not trained on log-probs of others
        input_transform: records are read as they are
        input_format: the tokenizer's chat template renders questions
        field_human: write field_instruction in a form of your own
        field_model: write field_output in a form of your own
        skip: sources are read from their beginning; write split: train[N:]
        step_separator max_completion_length
        train_on_last_step_only: models are not trained by rewards
        """
    ),
)
