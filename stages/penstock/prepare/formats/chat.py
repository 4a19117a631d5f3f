"""`chat`: conversations through the tokenizer's chat template, trained on the assistant's turns.

Which tokens are the assistant's is marked by the template itself (`{% generation %}`). Where it is
not, a turn is what the conversation has more with it than without it: the tokens up to the turn,
with the prompt to answer, and up to its end must both be a beginning of the whole. A turn ends with
its last special token; what the template puts after that is not the model's to say.
"""

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.prepare.faults import BadRow, checked_text, column, kind_of, optional_text
from penstock.prepare.formats.plain import token_ids
from penstock.prepare.formats.sample import Encoder, Record, Sample, each
from penstock.prepare.settings import DatasetSettings

MARKS_TURNS = re.compile(r"\{%-?\s*generation\b")

NOT_YET = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "images", "audio")
"""Parts of a message that templates read and this format does not yet carry."""

Message = dict[str, str]
TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What a chat template raises, by itself or by what it does to the messages."""


def chat(settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Conversations in the column `field_messages`, a system prompt in `field_system`."""
    encode = conversations(tokenizer)

    def messages(record: Record) -> list[Message]:
        found = _checked(settings.field_messages, column(record, settings.field_messages))
        system = optional_text(record, settings.field_system)
        if system and found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": system})
        return found

    def encode_all(records: Sequence[Record]) -> list[Sample | BadRow]:
        found: list[list[Message] | BadRow] = []
        for record in records:
            try:
                found.append(messages(record))
            except BadRow as fault:
                found.append(fault)
        return encode(found)

    return encode_all


class conversations:  # noqa: N801 - used as a function
    """Encodes checked conversations; faults among them are passed through."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises StageError when the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise StageError(
                "The tokenizer has no chat template, so conversations have no form.\n"
                "  Add chat_template.jinja to its folder, or set model.tokenizer_path to one that "
                "has it."
            )
        self._tokenizer = tokenizer
        self._is_marked = bool(MARKS_TURNS.search(tokenizer.get_chat_template()))
        self._special = {
            token for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }

    def __call__(self, found: Sequence[list[Message] | BadRow]) -> list[Sample | BadRow]:
        """One sample or fault for each conversation."""
        good = [entry for entry in found if not isinstance(entry, BadRow)]
        encoded = iter(self._by_marks(good) if self._is_marked else each(self._by_prefix, good))
        return [entry if isinstance(entry, BadRow) else next(encoded) for entry in found]

    def _by_marks(self, found: list[list[Message]]) -> list[Sample | BadRow]:
        """Many at once; one by one where one of them breaks the template."""
        if not found:
            return []
        try:
            return self._marked(found)
        except TEMPLATE_FAULTS as error:
            if len(found) == 1:
                return [BadRow("template", f"the chat template refuses it: {error}")]
            return [sample for messages in found for sample in self._by_marks([messages])]

    def _marked(self, found: list[list[Message]]) -> list[Sample | BadRow]:
        encoded: Any = self._tokenizer.apply_chat_template(
            found, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return [Sample.where(ids, mask) for ids, mask in pairs]

    def _by_prefix(self, messages: list[Message]) -> Sample:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if turns[:1] == [0]:
            raise BadRow(
                "template",
                "it begins with the assistant, so where its turn starts is not known; the chat "
                "template needs {% generation %} marks",
            )
        try:
            texts = [self._rendered(messages, "closed")]
            for turn in turns:
                texts.append(self._rendered(messages[:turn], "asking"))
                texts.append(self._rendered(messages[: turn + 1], "closed"))
        except TEMPLATE_FAULTS as error:
            raise BadRow("template", f"the chat template refuses it: {error}") from error
        whole, *prefixes = token_ids(self._tokenizer, texts, add_special_tokens=False)
        trained = [0] * len(whole)
        for turn, before, after in zip(turns, prefixes[::2], prefixes[1::2], strict=True):
            if whole[: len(before)] != before or whole[: len(after)] != after:
                raise BadRow(
                    "template",
                    f"message {turn + 1} reads differently once others follow, so its tokens are "
                    "not known; the chat template needs {% generation %} marks",
                )
            end = self._end_of_turn(whole, len(before), len(after))
            trained[len(before) : end] = [1] * (end - len(before))
        return Sample.where(whole, trained)

    def _rendered(self, messages: list[Message], form: str) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=form == "asking"
        )
        assert isinstance(text, str)
        return text

    def _end_of_turn(self, ids: list[int], start: int, end: int) -> int:
        last = next((i for i in range(end - 1, start - 1, -1) if ids[i] in self._special), None)
        if last is None or str(self._tokenizer.decode(ids[last + 1 : end])).strip():
            return end
        return last + 1


def _checked(name: str, value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name} is {kind_of(value)} where a list of messages is meant")
    if not value:
        raise BadRow("empty", f"{name} is empty")
    return [_message(f"{name}[{index}]", entry) for index, entry in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise BadRow("wrong_type", f"{where} is {kind_of(value)} where an object is meant")
    for part in NOT_YET:
        if value.get(part):
            raise BadRow("bad_value", f"{where} has {part}, which is not available yet")
    for part in ("role", "content"):
        if part not in value:
            raise BadRow("missing_column", f"{where} has no {part}; it has {', '.join(value)}")
        checked_text(f"{where}.{part}", value[part])
    if value["role"] in ("tool", "function"):
        raise BadRow("bad_value", f"{where} is of a tool, which is not available yet")
    return {"role": value["role"], "content": value["content"]}
