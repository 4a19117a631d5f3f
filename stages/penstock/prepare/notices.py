"""Warnings about prepared data, one line each."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.prepare.unread_columns import unread_columns
from penstock.rows.prepared import PreparedSamples
from penstock.rows.schema import SPLITS

SECTIONS = {"train": "datasets", "validation": "test_datasets", "avoid": "decontaminate_datasets"}
"""The list in section `data` of sources with a role."""

REASON_TEXTS = {
    "empty": "empty",
    "no_trained_tokens": "without an answer to train on (system or user turns alone, masked, or"
    " longer than max_seq_len before it begins)",
    "same_answers": "with the same answer twice",
    "too_long": "longer than max_seq_len",
    "invalid_json": "not JSON",
    "missing_column": "without a column",
    "wrong_type": "with a value of the wrong type",
    "bad_value": "with a value that cannot be used",
    "template": "refused by the chat template",
}
"""Reasons for dropped records; other reasons are requested by settings."""


def long_sample_warnings(prepared: Path, row_length: int) -> Iterator[str]:
    """Yield a warning for each split with samples that are longer than a row; packing refuses
    them."""
    for split in SPLITS:
        lengths = PreparedSamples(prepared, split).lengths()
        if count := int((lengths > row_length).sum()):
            yield (
                f"warning: {count:,} of {len(lengths):,} {split} samples are longer than a row of "
                f"{row_length:,} tokens (data.sample_packing_sequence_len); the longest has "
                f"{int(lengths.max()):,}; write max_seq_len: {row_length} in data."
                f"{SECTIONS[split]}, which cuts them as data.truncation_mode says, or a longer row"
            )


def token_warnings(without_end: int, repeated_bos: int, *, records: int) -> Iterator[str]:
    """Yield warnings about special tokens; counts are of records."""
    if without_end:
        yield (
            f"warning: {without_end:,} of {records:,} records train an answer that no stop token "
            "ends (EOS, or a special token that the chat template writes after every answer), so "
            "the model is not taught to stop there; write data.chat_template: chatml (or another "
            "name), or name the stop token in eos_token_id of generation_config.json beside the "
            "tokenizer"
        )
    if repeated_bos:
        yield (
            f"note: {repeated_bos:,} of {records:,} records begin with the BOS token that the "
            "tokenizer adds; it is not added again"
        )


def data_warnings(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings from the facts of the prepare stage."""
    dropped = {name: count for name, count in facts["dropped"].items() if name in REASON_TEXTS}
    if dropped:
        reasons = sorted(dropped.items(), key=lambda item: -item[1])
        counts = "; ".join(f"{count:,} {REASON_TEXTS[name]}" for name, count in reasons)
        yield (
            f"warning: {sum(dropped.values()):,} of {facts['records']:,} records give no sample: "
            f"{counts}; penstock data stats shows examples"
        )
    if blank := facts.get("blank_answers"):
        yield (
            f"warning: {blank:,} of {facts['records']:,} records train an empty answer (only its "
            "end token); fill it, or remove the record"
        )
    if first := facts.get("assistant_first"):
        yield (
            f"warning: {first:,} of {facts['records']:,} records start with an assistant message, "
            "which is trained without a prompt; add a user message before it, or give it "
            "weight: 0"
        )
    if repeated := facts.get("validation_in_train"):
        yield (
            f"warning: {repeated:,} of {facts['rows']['validation']:,} validation samples have the "
            "same tokens as a training sample, so eval_loss is too low; write data.deduplicate: "
            "exact"
        )
    yield from token_warnings(
        facts.get("without_end", 0), facts.get("repeated_bos", 0), records=facts["records"]
    )
    for source in facts["sources"]:
        location = f"{source['label']} (data.{SECTIONS[source['role']]}.{source['dataset']})"
        unread = source.get("unread", {})
        examples = source.get("unread_examples", {})
        for fault in unread_columns(unread, source["records"], source["type"], examples):
            yield f"warning: {location}: {fault}"
