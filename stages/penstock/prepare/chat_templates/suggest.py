"""Finds the included chat template that fits records and a tokenizer."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.prepare.chat_templates.resolve import SUFFIX, TEMPLATES, template_names
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.images import ImagesFound
from penstock.prepare.readers.records import Value
from penstock.prepare.settings import DatasetSettings
from penstock.rows.chat_template import ChatTemplate
from penstock.rows.template_tokens import SPECIAL_LIKE, cut_tokens, end_of_turn


def suggest_chat_template(
    records: Sequence[dict[str, Any]],
    settings: DatasetSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> str | None:
    """The name of the included chat template that renders every record and whose special tokens
    the tokenizer has; None if there is none.

    Of several: one that ends an answer as the tokenizer's own template does, that marks roles with
    special tokens, and that adds the fewest tokens.
    """
    own_end = end_of_turn(tokenizer, {}) if tokenizer.chat_template else None
    ranked: list[tuple[bool, bool, bool, int, str]] = []
    for name in template_names():
        text = (TEMPLATES / f"{name}{SUFFIX}").read_text(encoding="utf-8")
        kwargs = settings.chat_template.kwargs if settings.chat_template else "{}"
        template = ChatTemplate(text=text, kwargs=kwargs, where=name)
        with_template = template.apply(tokenizer)
        if cut_tokens(with_template, template.variables):
            continue
        count = _count_tokens(
            records, settings.model_copy(update={"chat_template": template}), tokenizer
        )
        if count is None:
            continue
        end = end_of_turn(with_template, template.variables)
        other_end = own_end is not None and end != own_end
        ranked.append((end is None, other_end, not SPECIAL_LIKE.search(text), count, name))
    return min(ranked)[-1] if ranked else None


def _count_tokens(
    records: Sequence[dict[str, Any]],
    settings: DatasetSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> int | None:
    """The number of tokens of the records; None if the template does not render all of them."""
    values: list[Value] = list(records)
    try:
        batch = Encoder(settings, tokenizer)(values)
    except (StageError, ImagesFound):
        return None
    if any(fault.reason == "template" for fault in batch.faults.values()):
        return None
    return int(sum(side.lengths.sum() for side in batch.sides))
