"""LLaMA-Factory: data sets by the names that `dataset_info.json` gives them."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from penstock.config.translate.shared import SOURCES, TESTS, names_in
from penstock.config.translate.translation import Entry

INFO = "dataset_info.json"
NOT_FOUND = (
    f"{INFO} says where these are and what they hold, and is neither in dataset_dir nor beside this"
    " file: files of these names in dataset_dir are taken, and what they hold is told by their"
    " first records"
)

# Types by stage, where the stage says them.
TYPES = {"pt": "text", "dpo": "preference", "kto": "kto"}

ROLE_TAGS: Mapping[str, str] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "tool_call",
    "system_tag": "system",
}
KNOWN_TAGS: Mapping[str, tuple[str, ...]] = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt"),
    "tool": ("observation", "tool", "function"),
    "tool_call": ("function_call",),
    "system": ("system",),
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "field_instruction", "query": "field_input", "response": "field_output"},
    "preference": {"prompt": "field_instruction", "query": "field_input"},
    "kto": {"prompt": "field_prompt", "response": "field_completion"},
    "text": {"prompt": "field_text"},
}
MEDIA = ("images", "videos", "audios")

# Keys of a file for data sets with these columns, and their names here.
BOUNDED: Mapping[str, Mapping[str, str]] = {
    "images": {"image_min_pixels": "image_min_pixels", "image_max_pixels": "image_max_pixels"},
    "videos": {"video_fps": "video_fps", "video_maxlen": "video_max_frames"},
}
BOUNDS = {key: field for keys in BOUNDED.values() for key, field in keys.items()}

# What an entry says besides, and its names here.
OURS: Mapping[str, str] = {"subset": "name", "num_samples": "max_samples"}

READ = ("file_name", "formatting", "ranking", "columns", "tags", "split", "hf_hub_url", *OURS)
OF_OTHER_HUBS = ("ms_hub_url", "om_hub_url")


def sources(entry: Entry) -> None:
    """Names of data sets."""
    name = TESTS if entry.key == "eval_dataset" else SOURCES
    info, folder = _read_info(entry)
    datasets, reasons = list[dict[str, Any]](), list[str]()
    for dataset in names_in(entry.value):
        if info is None:
            datasets.append(_unknown(entry, folder / f"{dataset}.json"))
        elif isinstance(described := info.get(dataset), dict):
            description = cast("dict[str, Any]", described)
            datasets.append(_source(entry, description, folder, reasons))
        else:
            entry.refuse(f"{dataset} is not in {folder / INFO}, which has {', '.join(info)}")
            return
    if name == SOURCES and (shares := entry.get("interleave_probs")) is not None:
        for source, share in zip(datasets, names_in(shares), strict=False):
            source["weight"] = float(share)
    common = {"image_folder": entry.get("media_dir"), "max_samples": entry.get("max_samples")}
    for source in datasets:
        if source.get("type") == "text":
            common.pop("image_folder", None)
        source.update({key: value for key, value in common.items() if value})
    entry.put(name, datasets)
    if info is None:
        entry.approximated(NOT_FOUND)
    elif reasons:
        entry.approximated("; ".join(dict.fromkeys(reasons)))


def _read_info(entry: Entry) -> tuple[dict[str, Any] | None, Path]:
    # The content of `dataset_info.json` and its folder; None if there is none.
    named = entry.get("dataset_dir", "data")
    if isinstance(named, dict):
        return cast("dict[str, Any]", named), Path()
    beside = entry.draft.folder
    above = (folder / str(named) for folder in (beside, *beside.parents))
    for folder in (Path(str(named)), beside, *above):
        path = folder / INFO
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8")), folder
    return None, Path(str(named))


def _unknown(entry: Entry, path: Path) -> dict[str, Any]:
    kind = TYPES.get(str(entry.get("stage", "sft")))
    media = {} if kind == "text" else media_bounds(entry)
    return {"path": str(path), **({"type": kind} if kind else {}), **media}


def media_bounds(entry: Entry, columns: Collection[str] = BOUNDED) -> dict[str, Any]:
    """Sizes of images and frames of videos of a data set with these columns."""
    bounds = {
        field: float(value) if field == "video_fps" else value
        for column in BOUNDED
        if column in columns
        for key, field in BOUNDED[column].items()
        if (value := entry.get(key)) is not None
    }
    if "video_max_frames" in bounds:  # without a rate it takes 2 frames of a second
        bounds.setdefault("video_fps", 2.0)
    return bounds


def _source(
    entry: Entry, info: Mapping[str, Any], folder: Path, reasons: list[str]
) -> dict[str, Any]:
    columns: dict[str, Any] = info.get("columns") or {}
    hubs = ("hf_hub_url", *OF_OTHER_HUBS, "cloud_file_name")
    hub_id = next((str(info[key]) for key in hubs if info.get(key)), None)
    source: dict[str, Any] = {"path": hub_id or str(folder / str(info["file_name"]))}
    source |= {OURS[key]: info[key] for key in OURS if info.get(key)}
    if info.get("split", "train") != "train":
        source["split"] = info["split"]
    is_chat = info.get("formatting", "alpaca") in ("sharegpt", "openai")
    source["type"] = kind = _kind(entry, info, columns, is_chat=is_chat)
    if is_chat:
        source |= _message_fields(info, columns, kind, reasons)
    else:
        own = {} if columns else {"prompt": "instruction", "query": "input", "response": "output"}
        named = {"query": "input", **columns} if "query" in columns else columns
        table = COLUMNS.get("alpaca" if kind == "instruction" else kind, {})
        source |= {
            field: (named or own)[key] for key, field in table.items() if (named or own).get(key)
        }
        if columns.get("history"):
            reasons.append(f"the column {columns['history']} of earlier turns is not read")
        if kind == "kto" and columns.get("query"):
            reasons.append(f"the column {columns['query']} is not part of the prompt")
    source |= {f"field_{key}": columns[key] for key in ("system", "tools") if columns.get(key)}
    if kind == "preference":
        source |= {f"field_{key}": columns[key] for key in ("chosen", "rejected") if key in columns}
    if kind == "kto" and columns.get("kto_tag"):
        source["field_label"] = columns["kto_tag"]
    if kind not in ("text", "instruction"):
        source |= media_bounds(entry, columns)
    reasons += [
        f"the column {columns[key]} is read if it is named {key}"
        for key in MEDIA
        if columns.get(key, key) not in (key, key.rstrip("s"))
    ]
    if unread := [key for key in info if key not in (*READ, *OF_OTHER_HUBS)]:
        reasons.append(f"{', '.join(unread)} in {INFO} is not read")
    return source


def _kind(
    entry: Entry, info: Mapping[str, Any], columns: Mapping[str, Any], *, is_chat: bool
) -> str:
    stage = str(entry.get("stage", "sft"))
    if stage == "pt":
        return "text"
    if info.get("ranking"):
        return "preference"
    if columns.get("kto_tag"):
        return "kto"
    if is_chat:
        tags: dict[str, Any] = info.get("tags") or {}
        keys = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        return "sharegpt" if keys == ("from", "value") else "chat"
    # Without a column `query` a record's `input` is not part of the question.
    return "instruction" if columns and not columns.get("query") else "alpaca"


def _message_fields(
    info: Mapping[str, Any], columns: Mapping[str, Any], kind: str, reasons: list[str]
) -> dict[str, Any]:
    tags: dict[str, Any] = info.get("tags") or {}
    fields: dict[str, Any] = {"field_messages": columns.get("messages") or "conversations"}
    if kind == "text":
        return {"field_text": fields["field_messages"]}
    keys = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if keys not in (("from", "value"), ("role", "content")):
        fields |= {"field_message_role": keys[0], "field_message_content": keys[1]}
    roles = {
        role: [str(tags[tag])]
        for tag, role in ROLE_TAGS.items()
        if tags.get(tag) and tags[tag] not in KNOWN_TAGS[role]
    }
    if unread := [tag for tag in tags if tag not in (*ROLE_TAGS, "role_tag", "content_tag")]:
        reasons.append(f"{', '.join(unread)} of tags is not read")
    return {**fields, **({"message_roles": roles} if roles else {})}
