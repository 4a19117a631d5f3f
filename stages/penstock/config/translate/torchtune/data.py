"""torchtune: data sets by the names of their builders."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.config.translate import rule
from penstock.config.translate.dialect import Table, by_reason, listed, same_names, typed
from penstock.config.translate.shared import SOURCES, TESTS
from penstock.config.translate.translate_key import translate_items
from penstock.config.translate.translation import Entry

ALPACA = {"type": "alpaca"}
PAIRS = {"type": "preference"}
QUESTIONS = {"type": "instruction", "field_instruction": "input"}

# Builders to the data set and the columns that they read.
BUILDERS: Mapping[str, Mapping[str, Any]] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", **ALPACA},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", **ALPACA},
    "grammar_dataset": {"path": "liweili/c4_200m", **QUESTIONS},
    "samsum_dataset": {
        "path": "Samsung/samsum",
        "type": "instruction",
        "field_instruction": "dialogue",
        "field_output": "summary",
    },
    "slimorca_dataset": {"path": "Open-Orca/SlimOrca-Dedup", "type": "sharegpt"},
    "wikitext_dataset": {"path": "EleutherAI/wikitext_document_level", "type": "text"},
    "cnn_dailymail_articles_dataset": {
        "path": "ccdv/cnn_dailymail",
        "type": "text",
        "field_text": "article",
    },
    "stack_exchange_paired_dataset": {
        "path": "lvwerra/stack-exchange-paired",
        **PAIRS,
        "field_prompt": "question",
        "field_chosen": "response_j",
        "field_rejected": "response_k",
    },
    "hh_rlhf_helpful_dataset": {"path": "RLHFlow/HH-RLHF-Helpful-standard", **PAIRS},
    "instruct_dataset": {**QUESTIONS, "field_output": "output"},
    "chat_dataset": {"type": "chat"},
    "text_completion_dataset": {"type": "text"},
    "preference_dataset": PAIRS,
    "multimodal_chat_dataset": {"type": "chat"},
    "multimodal.multimodal_chat_dataset": {"type": "chat"},
    "vqa_dataset": QUESTIONS,
    "gsm8k_sft": {
        "path": "openai/gsm8k",
        "name": "main",
        "type": "instruction",
        "field_instruction": "question",
        "field_output": "answer",
    },
}

# In what builders differ from these.
NEAR = by_reason(
    """
    alpaca_dataset
    alpaca_cleaned_dataset: the tokenizer's chat template, if any, renders questions
    slimorca_dataset: answers of the assistant are trained
    gsm8k_sft: answers are rendered as they are, without tags
    """
)

# Names in a `column_map` to ours; others have none, and are read under their own names.
COLUMNS: Mapping[str, str] = {
    **{name: f"field_{name}" for name in ("output", "prompt", "chosen", "rejected", "system")},
    "input": "field_instruction",
    **dict.fromkeys(("messages", "conversations"), "field_messages"),
}

FILE_KINDS = ("json", "csv", "parquet", "text")


def sources(entry: Entry) -> None:
    """A data set, or a list of several."""

    name = TESTS if entry.key == "dataset_val" else SOURCES
    items = cast("list[dict[str, Any]]", [dict(item) for item in listed(entry.value)])
    for item in items:
        item.setdefault("_component_", "torchtune.datasets.instruct_dataset")
    entry.put(name, [{} for _ in items])
    translate_items(entry, items, TABLE, name)


def _builder(entry: Entry) -> None:
    name = str(entry.value).removeprefix("torchtune.datasets.").removeprefix("torchtune.dev.grpo.")
    short = name.rpartition(".")[2]
    builder: Mapping[str, Any] = BUILDERS.get(name) or BUILDERS.get(short) or {}
    if not builder:
        if "source" not in entry.beside:
            builders = ", ".join(BUILDERS)
            why = f"there are {builders}; others with source: and split:"
            entry.refuse(f"{short[:40]!r} has no counterpart; {why}")
            return
        entry.approximated("what its records hold is told by the first ones")
    source = entry.draft.value(entry.into.rstrip("."))
    for column, value in builder.items():
        if column not in source:
            entry.put(column, value)
    entry.decides(f"{entry.into}type")
    if why := NEAR.get(short):
        entry.approximated(why)


def _columns(entry: Entry) -> None:
    names = cast("dict[str, Any]", entry.value)
    entry.decides(entry.into.rstrip("."))
    unread: list[str] = []
    for name, column in names.items():
        if field := COLUMNS.get(name):
            entry.put(field, column)
        elif column != name:
            unread.append(f"{name}: {column}")
    if unread:
        entry.leave_out(f"columns have their own names of {', '.join(unread)}")


MASKS: Mapping[str, tuple[str, Any]] = {
    "train_on_all": ("data.train_on_prompt", True),
    "train_on_assistant": ("data.train_on_prompt", False),
    "train_on_last": ("data.train_on_turns", "last"),
}


def _of_all_data(entry: Entry) -> None:
    # Keys of a data set whose setting is one of all data sets here.
    key = entry.key.rpartition(".")[2]
    if key == "masking_strategy":
        name, value = MASKS[entry.value]
    else:
        name = "data.add_eos" if key == "add_eos" else "data.train_on_prompt"
        value = bool(entry.value)
    entry.draft.put(name, value)
    entry.decides(name)


def _partition(entry: Entry) -> None:
    # `0-0/10` or `1-9/10`: the first to the last of so many parts.
    span, _, count = str(entry.value).partition("/")
    first, _, last = span.partition("-")
    start, end = (round(100 * part / int(count)) for part in (int(first), int(last) + 1))
    source = entry.draft.value(entry.into.rstrip("."))
    entry.put("split", f"{source.get('split', 'train')}[{start}%:{end}%]")


# The keys of a data set.
TABLE = Table(
    types=typed(switch="packed train_on_input"),
    same={
        **same_names("", "name split revision max_samples weight"),
        "subset": "name",
        "image_dir": "image_folder",
        "images_dir": "image_folder",
    },
    computed={
        # The columns that are written stand before those of the builder.
        "_component_": _builder,
        # A hub id, or the kind of the files in `data_files`.
        "source": rule.when(
            lambda entry: entry.value in FILE_KINDS and entry.beside.get("data_files"),
            rule.put("ds_type"),
            rule.put("path"),
        ),
        "data_files": rule.when(
            lambda entry: entry.beside.get("source") in FILE_KINDS and isinstance(entry.value, str),
            rule.put("path"),
            rule.put("data_files"),
        ),
        "column_map": _columns,
        "column": rule.put("field_text"),
        "conversation_column": rule.put("field_messages"),
        "conversation_style": rule.choice("type", {"openai": "chat", "sharegpt": "sharegpt"}),
        **dict.fromkeys(("train_on_input", "masking_strategy", "add_eos"), _of_all_data),
        "partition": _partition,
        **dict.fromkeys(
            ("packed", "split_across_pack"), rule.decides("data.sample_packing_method")
        ),
        "max_seq_len": rule.put("max_seq_len"),
        "new_system_prompt": rule.left_out("write it into the data"),
        "image_tag": rule.no_effect("images stand where the records have <image>"),
    },
    unsupported=by_reason(
        """
        transform: images are processed as preprocessor_config.json of the model says
        filter_fn filter_kwargs: records are read as they are
        """
    ),
)
