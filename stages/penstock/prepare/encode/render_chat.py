"""Conversations as text, with what the assistant says marked in it.

Which characters are the assistant's is marked by the chat template itself (`{% generation %}`).
Where it is not, a turn is what the conversation has more with it than without it: the text up to
the turn, with the prompt to answer, and up to its end must both be a beginning of the whole; where
they are not, conversations are rendered turn by turn (`encode.by_turn`). A turn ends with its last
special token; what the template puts after that is not the model's to say.

Without a chat template a question and its answer are plain text, divided by a blank line.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.document import Document, Span
from penstock.prepare.encode.render_per_turn import render_per_turn
from penstock.prepare.formats.conversation import REASONING, Conversation, Message
from penstock.prepare.settings import DatasetSettings

log = logging.getLogger("penstock.prepare")

ANSWER_END = 16
"""Characters of the end of an answer that are looked for in what a template makes of it."""

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")

STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

DATE = date(2024, 7, 26)
"""What a template writes that asks for today's date, so that the same data gives the same tokens
tomorrow. It is the one that Llama's templates fall back to."""

BREAK = "\n\n"
"""Between the parts of a conversation that has no chat template."""

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    ArithmeticError,
)
"""What a chat template raises, by itself or by what it does to the messages."""

_Part = Literal["any", "prompt"]
"""Where turns may be dropped."""

NO_TEMPLATE = "the tokenizer has no chat template"


class Renderer:
    """Conversations as documents, by a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, its: DatasetSettings) -> None:
        self._tokenizer = tokenizer
        self._its = its
        self._names: dict[str, Any] = {**tokenizer.special_tokens_map}
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._may_drop = its.truncation_mode == "drop_turns" and its.max_seq_len is not None
        self._templates: dict[str, _Template] = {}
        self.num_per_turn = 0
        """Conversations that were rendered turn by turn."""

    def render(self, conversation: Conversation) -> Document:
        """The document it is. Raises BadRecord where the template refuses it or hides its turns."""
        if self._its.train_on_turns == "last":
            conversation = replace(conversation, trained=_last_turn_mask(conversation))
        return self._render(conversation, "any", 0)

    def render_completion(self, conversation: Conversation) -> Document:
        """The document of a prompt and an answer, which is trained whole.

        The tokens of the prompt are those it has by itself. Of its turns only what is before the
        last one, which the answer is to, may be dropped.
        """
        return self._render(conversation, "prompt", 0)

    def _render(self, whole: Conversation, part: _Part, turns: int) -> Document:
        conversation = (
            _drop_oldest_turns(whole, _turn_starts(whole, part), turns) if turns else whole
        )
        if self._tokenizer.chat_template:
            document = self._render_template(conversation)
        else:
            document = self._render_plain(conversation)
        if not document.spans:
            raise BadRecord("no_trained_tokens", "nothing in it is the assistant's to be trained")
        if self._its.mask_eos_in_loss:
            document.spans = self._exclude_end_tokens(document.text, document.spans)
        if part == "prompt":
            document.borders = "cut"
        if self._may_drop and not turns:
            document.droppable_turns = max(0, len(_turn_starts(whole, part)) - 1)
            document.drop_turns = partial(self._render, whole, part)
        return document

    def _render_plain(self, conversation: Conversation) -> Document:
        messages = conversation.messages
        roles = [message["role"] for message in messages]
        if roles[-2:] != ["user", "assistant"] or set(roles[:-2]) - {"system"}:
            said = ", ".join(roles)
            raise BadRecord("template", f"{NO_TEMPLATE}, so turns of {said} have no form")
        if conversation.tools or any(message.get("tool_calls") for message in messages):
            raise BadRecord("template", f"{NO_TEMPLATE}, so tools have no form")
        *parts, answer = [str(message["content"]) for message in messages]
        prompt = BREAK.join(part for part in parts if part) + BREAK
        spans = ((len(prompt), len(prompt) + len(answer)),) if conversation.trained[-1] else ()
        return Document(prompt + answer, spans, "cut")

    def _render_template(self, conversation: Conversation) -> Document:
        own: Any = conversation.tools
        template = self._template(self._tokenizer.get_chat_template(tools=own))
        _require_tool_support(template.text, conversation)
        conversation = _rename_reasoning(template.text, conversation)
        if template.is_marked:
            render = self._render_marked
        else:
            render = (
                self._render_per_turn
                if self._its.chat_template == "training"
                else self._render_by_prefix
            )
        try:
            document = render(template.text, conversation)
        except TEMPLATE_ERRORS as error:
            raise BadRecord("template", f"the chat template refuses it: {error}") from error
        _require_answers(document.text, conversation)
        return document

    def _template(self, text: str) -> "_Template":
        if text not in self._templates:
            dated = STRFTIME_NOW.sub(lambda found: repr(DATE.strftime(found[2])), text)
            self._templates[text] = _Template(dated, bool(GENERATION_BLOCK.search(text)))
        return self._templates[text]

    def _render_marked(self, template: str, conversation: Conversation) -> Document:
        text, spans = self._render_with_spans(template, conversation)
        # A message may have several spans, or none: those before it are counted without it.
        counts = {0: 0, len(conversation.messages): len(spans)}
        kept: list[Span] = []
        for run in _trained_runs(conversation):
            for message in run:
                if message not in counts:
                    its = _message_prefix(conversation, message)
                    counts[message] = len(self._render_with_spans(template, its)[1])
            kept += spans[counts[run[0]] : counts[run[1]]]
        return Document(text, tuple(kept))

    def _render_by_prefix(self, template: str, conversation: Conversation) -> Document:
        num_messages = len(conversation.messages)
        turns = [i for i, is_trained in enumerate(conversation.trained) if is_trained]
        if turns and not turns[0]:
            raise BadRecord(
                "template",
                "it begins with the assistant, so where its turn starts is not known; the chat "
                "template needs {% generation %} marks",
            )
        # The whole, and up to the end of each turn but one that ends it.
        ends = [num_messages, *(turn + 1 for turn in turns if turn + 1 < num_messages)]
        (text, *closed), _ = self._render_prefixes(template, conversation, ends, "closed")
        asking, _ = self._render_prefixes(template, conversation, turns, "asking")
        after = dict(zip(ends, [text, *closed], strict=True))
        spans: list[Span] = []
        for turn, before in zip(turns, asking, strict=True):
            end = after[turn + 1]
            if not (text.startswith(before) and text.startswith(end)):
                if self._its.chat_template == "auto":
                    return self._render_per_turn(template, conversation)
                raise BadRecord(
                    "template",
                    f"message {turn + 1} reads differently once others follow, so its tokens are "
                    "not known; write data.chat_template: training, or use a chat template with "
                    "{% generation %} marks",
                )
            spans.append((len(before), self._end_of_turn(text, len(before), len(end))))
        return Document(text, tuple(spans), "cut")

    def _render_per_turn(self, template: str, conversation: Conversation) -> Document:
        """Each answer as the template renders it last."""

        def render(messages: Sequence[Message], is_asking: bool) -> str:
            form = "asking" if is_asking else "closed"
            [text], _ = self._apply_template(template, [messages], conversation.tools, form)
            return text

        if True not in conversation.trained:
            return Document("", ())
        text, found = render_per_turn(
            render, conversation, lambda text: self._special.search(text) is not None
        )
        if self._its.chat_template == "auto" and not self.num_per_turn:
            log.warning(
                "The chat template shows answers differently once others follow. Such "
                "conversations are rendered turn by turn, each answer as it is when it is the last "
                "one (data.chat_template: published leaves them out)."
            )
        self.num_per_turn += 1
        spans = [(start, self._end_of_turn(text, start, end)) for start, end in found]
        return Document(text, tuple(spans), "cut")

    def _render_with_spans(
        self, template: str, conversation: Conversation
    ) -> tuple[str, list[Span]]:
        """The whole conversation, and the spans that its template marks."""
        end = len(conversation.messages)
        [text], [spans] = self._render_prefixes(template, conversation, [end], "marked")
        return text, spans

    def _render_prefixes(
        self,
        template: str,
        conversation: Conversation,
        ends: Sequence[int],
        form: Literal["marked", "closed", "asking"],
    ) -> tuple[list[str], list[list[Span]]]:
        """Its messages up to each of `ends`, as the tokenizer's `apply_chat_template` renders them,
        and the spans marked in each."""
        beginnings = [conversation.messages[:end] for end in ends]
        return self._apply_template(template, beginnings, conversation.tools, form)

    def _apply_template(
        self,
        template: str,
        conversations: Sequence[Sequence[Message]],
        tools: list[dict[str, Any]] | None,
        form: Literal["marked", "closed", "asking"],
    ) -> tuple[list[str], list[list[Span]]]:
        if not conversations:
            return [], []
        options: dict[str, Any] = {
            "return_assistant_tokens_mask": form == "marked",
            "add_generation_prompt": form == "asking",
            "tools": tools,
        }
        filled = [[_drop_nulls(message) for message in messages] for messages in conversations]
        found: Any = render_jinja_template(filled, chat_template=template, **options, **self._names)
        return found

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        last = start
        for found in self._special.finditer(text, start, end):
            last = found.end()
        return end if last == start or text[last:end].strip() else last

    def _exclude_end_tokens(self, text: str, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The spans, each up to the special token that ends it."""
        found: list[Span] = []
        for start, end in spans:
            specials = list(self._special.finditer(text, start, end))
            is_ended = specials and not text[specials[-1].end() : end].strip()
            found.append((start, specials[-1].start() if is_ended else end))
        return tuple(found)


@dataclass(frozen=True)
class _Template:
    text: str
    is_marked: bool
    """Whether it says itself what the assistant's words are."""


def _drop_nulls(message: Message) -> Message:
    if None not in message.values():
        return message
    return {name: value for name, value in message.items() if value is not None}


def _require_tool_support(template: str, conversation: Conversation) -> None:
    """Raises BadRecord where the template would leave them out without a word."""
    are_called = any("tool_calls" in message for message in conversation.messages)
    for name, is_there in (("tools", conversation.tools), ("tool_calls", are_called)):
        if is_there and name not in template:
            raise BadRecord("template", f"the chat template has no place for {name}")


def _rename_reasoning(template: str, conversation: Conversation) -> Conversation:
    """The conversation with reasoning under the name that the template reads. Raises BadRecord where
    it reads none, and would leave reasoning out without a word."""
    if not any(name in message for message in conversation.messages for name in REASONING):
        return conversation
    read = [name for name in REASONING if re.search(rf"""[.'"]{name}\b""", template)]
    if not read:
        raise BadRecord("template", "the chat template has no place for reasoning")
    messages: list[Message] = []
    for message in conversation.messages:
        has = [name for name in REASONING if name in message]
        if has and not set(has) & set(read):
            kept = {name: value for name, value in message.items() if name not in has}
            message = {**kept, read[0]: message[has[0]]}
        messages.append(message)
    return replace(conversation, messages=messages)


def _turn_starts(conversation: Conversation, part: _Part) -> list[int]:
    """Where turns begin: at a user's words, and they last up to the user's next."""
    messages = conversation.messages
    if part == "prompt" and True in conversation.trained:
        messages = messages[: conversation.trained.index(True)]
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [i for i in starts if not i or messages[i - 1]["role"] != "user"]


def _drop_oldest_turns(
    conversation: Conversation, starts: Sequence[int], turns: int
) -> Conversation:
    """Without the oldest turns; what stands before the first turn stays where it is a system's."""
    messages = conversation.messages
    head = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    kept = [*range(head), *range(starts[turns], len(messages))]
    return replace(
        conversation,
        messages=[messages[i] for i in kept],
        trained=tuple(conversation.trained[i] for i in kept),
    )


def _require_answers(text: str, conversation: Conversation) -> None:
    """Raise BadRecord unless every answer that is trained is in the text, by how it ends.

    Templates take out reasoning and trim; some leave out whole turns without a word.
    """
    for number, message in enumerate(conversation.messages, start=1):
        words = (message["content"] or "").rpartition("</think>")[2].strip()
        if conversation.trained[number - 1] and words[-ANSWER_END:] not in text:
            raise BadRecord(
                "template",
                f"the chat template leaves out what the assistant says (message {number})",
            )


def _last_turn_mask(conversation: Conversation) -> tuple[bool, ...]:
    """Of what may be trained, that which follows the last question before the end of it."""
    trained = conversation.trained
    last = max((i for i, is_trained in enumerate(trained) if is_trained), default=0)
    asked = [i for i in range(last) if conversation.messages[i]["role"] == "user"]
    start = asked[-1] if asked else 0
    return tuple(is_trained and i >= start for i, is_trained in enumerate(trained))


def _message_prefix(conversation: Conversation, stop: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:stop])


def _trained_runs(conversation: Conversation) -> list[tuple[int, int]]:
    """Messages from the first number up to the second, so that all of the assistant's in them are
    trained and no others: as few runs as there can be."""
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    runs: list[tuple[int, int]] = []
    start: int | None = None
    for index in answers:
        if not conversation.trained[index]:
            if start is not None:
                runs.append((start, index))
            start = None
        elif start is None:
            start = 0 if index == answers[0] else index
    return runs if start is None else [*runs, (start, len(conversation.messages))]
