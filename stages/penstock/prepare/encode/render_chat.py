"""Render conversations with the chat template, and mark the assistant's text.

Assistant spans come from `{% generation %}` blocks of the chat template. Without them, a turn's
span is the difference of two renderings: the messages before it with the generation prompt, and the
messages up to it; both must be prefixes of the whole text. If they are not, the conversation is
rendered turn by turn (`render_per_turn`). A turn ends with its last special token; text that the
template adds after it is not trained.

Without a chat template, a prompt and its answer are plain text, separated by a blank line.
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
from penstock.prepare.encode.images import SliceImages, with_parts
from penstock.prepare.encode.render_per_turn import render_per_turn
from penstock.prepare.formats.conversation import REASONING, Conversation, Message
from penstock.prepare.settings import DatasetSettings

log = logging.getLogger("penstock.prepare")

ANSWER_END = 16
"""Number of final characters of an answer that must be in the rendered text."""

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")

STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

DATE = date(2024, 7, 26)
"""Fixed date for templates that call `strftime_now`, so that tokens do not change from day to day.
It is the fallback date of Llama's templates."""

BREAK = "\n\n"
"""Separator of the parts of a conversation without a chat template."""

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
"""Errors that chat templates raise."""

_Part = Literal["any", "prompt"]
"""The part of a conversation from which turns may be dropped."""

PROBE = "\ue000text\ue001"
"""A text that no template has itself."""

NO_TEMPLATE = "the tokenizer has no chat template"


class Renderer:
    """Renders conversations to documents with a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        its: DatasetSettings,
        images: SliceImages | None = None,
    ) -> None:
        """`images`: the media of the conversations, whose media are their digests."""
        self._tokenizer = tokenizer
        self._its = its
        self._images = images
        variables = its.chat_template.variables if its.chat_template else {}
        self._names: dict[str, Any] = {**tokenizer.special_tokens_map, **variables}
        self._arguments = self._names
        """Variables of the template for the conversation that is rendered."""
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._may_drop = its.truncation_mode == "drop_turns" and its.max_seq_len is not None
        self._templates: dict[str, _Template] = {}
        self._parts_only = set[str]()
        """Templates that show only contents that are lists of parts."""
        self.num_per_turn = 0
        """Number of conversations that were rendered turn by turn."""

    def render(self, conversation: Conversation) -> Document:
        """Render a conversation. Raises BadRecord if the template fails or its turns cannot be
        located."""
        if self._its.train_on_turns == "last":
            conversation = replace(conversation, weights=_last_turn_weights(conversation))
        return self._render(conversation, "any", 0)

    def render_completion(self, conversation: Conversation) -> Document:
        """Render a prompt and a completion, all of which is trained.

        The prompt has the same tokens as on its own. Its turns may be dropped, except the last one.
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
        if self._images:
            document = self._images.expand(document, conversation.media)
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
        if conversation.media:
            raise BadRecord("template", f"{NO_TEMPLATE}, so media have no form")
        if conversation.tools or any(message.get("tool_calls") for message in messages):
            raise BadRecord("template", f"{NO_TEMPLATE}, so tools have no form")
        *parts, answer = [str(message["content"]) for message in messages]
        prompt = BREAK.join(part for part in parts if part) + BREAK
        weight = conversation.weights[-1]
        spans = ((len(prompt), len(prompt) + len(answer)),) if weight else ()
        return _build_document(prompt + answer, spans, [weight] * len(spans))

    def _render_template(self, conversation: Conversation) -> Document:
        self._arguments = {**self._names, **conversation.template_kwargs}
        own: Any = conversation.tools
        template = self._template(self._chat_template(own))
        _require_tool_support(template.text, conversation)
        conversation = _rename_reasoning(template.text, conversation)
        if template.is_marked:
            render = self._render_marked
        else:
            render = (
                self._render_per_turn
                if self._its.turn_rendering == "per_turn"
                else self._render_by_prefix
            )
        try:
            document = render(template.text, conversation)
        except TEMPLATE_ERRORS as error:
            raise BadRecord("template", f"the chat template refuses it: {error}") from error
        _require_answers(document.text, conversation)
        return document

    def _chat_template(self, tools: Any) -> str:
        """The template of the settings, or the processor's for data with images, as
        transformers."""
        if self._its.chat_template and self._its.chat_template.text is not None:
            return self._its.chat_template.text
        own = self._images and self._images.chat_template
        return own or self._tokenizer.get_chat_template(tools=tools)

    def _template(self, text: str) -> "_Template":
        if text not in self._templates:
            dated = STRFTIME_NOW.sub(lambda found: repr(DATE.strftime(found[2])), text)
            is_marked = bool(GENERATION_BLOCK.search(text))
            self._templates[text] = _Template(dated, is_marked)
            if self._images and not self._shows_text(dated):
                self._parts_only.add(dated)
        return self._templates[text]

    def _shows_text(self, template: str) -> bool:
        """Whether a template shows a content that is text, rather than a list of parts."""
        message = {"role": "user", "content": PROBE}
        try:
            [text], _ = self._apply_template(template, [[message]], None, "closed")
        except TEMPLATE_ERRORS:
            return False
        return PROBE in text

    def _render_marked(self, template: str, conversation: Conversation) -> Document:
        text, spans = self._render_with_spans(template, conversation)
        # A message may have any number of spans, so count those of the messages before it.
        counts = {0: 0, len(conversation.messages): len(spans)}
        kept: list[Span] = []
        weights: list[float] = []
        for first, last, weight in _trained_runs(conversation):
            for message in (first, last):
                if message not in counts:
                    its = _message_prefix(conversation, message)
                    counts[message] = len(self._render_with_spans(template, its)[1])
            kept += spans[counts[first] : counts[last]]
            weights += [weight] * (counts[last] - counts[first])
        return _build_document(text, kept, weights, borders="kept")

    def _render_by_prefix(self, template: str, conversation: Conversation) -> Document:
        num_messages = len(conversation.messages)
        turns = [i for i, is_trained in enumerate(conversation.trained) if is_trained]
        if turns and not turns[0]:
            raise BadRecord(
                "template",
                "it begins with the assistant, so where its turn starts is not known; the chat "
                "template needs {% generation %} marks",
            )
        # The whole conversation, and the prefixes that end with a trained turn.
        ends = [num_messages, *(turn + 1 for turn in turns if turn + 1 < num_messages)]
        (text, *closed), _ = self._render_prefixes(template, conversation, ends, "closed")
        asking, _ = self._render_prefixes(template, conversation, turns, "asking")
        after = dict(zip(ends, [text, *closed], strict=True))
        spans: list[Span] = []
        for turn, before in zip(turns, asking, strict=True):
            end = after[turn + 1]
            if not (text.startswith(before) and text.startswith(end)):
                if self._its.turn_rendering == "auto":
                    return self._render_per_turn(template, conversation)
                raise BadRecord(
                    "template",
                    f"message {turn + 1} reads differently once others follow, so its tokens are "
                    "not known; write data.turn_rendering: per_turn, or use a chat template with "
                    "{% generation %} marks",
                )
            spans.append((len(before), self._end_of_turn(text, len(before), len(end))))
        return _build_document(text, spans, [conversation.weights[turn] for turn in turns])

    def _render_per_turn(self, template: str, conversation: Conversation) -> Document:
        """Render each answer as if it were the last message."""

        def render(messages: Sequence[Message], is_asking: bool) -> str:
            form = "asking" if is_asking else "closed"
            [text], _ = self._apply_template(template, [messages], conversation.tools, form)
            return text

        if True not in conversation.trained:
            return Document("", ())
        text, found = render_per_turn(
            render, conversation, lambda text: self._special.search(text) is not None
        )
        if self._its.turn_rendering == "auto" and not self.num_per_turn:
            log.warning(
                "The chat template renders answers differently when other messages follow. Such "
                "conversations are rendered turn by turn, each answer as if it were the last "
                "message (data.turn_rendering: whole drops them)."
            )
        self.num_per_turn += 1
        spans = [(start, self._end_of_turn(text, start, end)) for start, end in found]
        return _build_document(text, spans, [weight for weight in conversation.weights if weight])

    def _render_with_spans(
        self, template: str, conversation: Conversation
    ) -> tuple[str, list[Span]]:
        """Render the whole conversation with the spans of its generation blocks."""
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
        """Render the messages up to each of `ends`, as `apply_chat_template` does, with the spans
        of generation blocks."""
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
        if template in self._parts_only:
            filled = [[with_parts(message) for message in messages] for messages in filled]
        found: Any = render_jinja_template(
            filled, chat_template=template, **options, **self._arguments
        )
        return found

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        last = start
        for found in self._special.finditer(text, start, end):
            last = found.end()
        return end if last == start or text[last:end].strip() else last

    def _exclude_end_tokens(self, text: str, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Shorten the spans to exclude their final special token."""
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
    """Whether it has generation blocks."""


def _build_document(
    text: str,
    spans: Sequence[Span],
    weights: Sequence[float],
    borders: Literal["cut", "kept"] = "cut",
) -> Document:
    """A document with the loss weight of each span."""
    is_weighted = any(weight != 1 for weight in weights)
    return Document(text, tuple(spans), borders, weights=tuple(weights) if is_weighted else None)


def _drop_nulls(message: Message) -> Message:
    if None not in message.values():
        return message
    return {name: value for name, value in message.items() if value is not None}


def _require_tool_support(template: str, conversation: Conversation) -> None:
    """Raise BadRecord if the template would silently ignore tools."""
    are_called = any("tool_calls" in message for message in conversation.messages)
    for name, is_there in (("tools", conversation.tools), ("tool_calls", are_called)):
        if is_there and name not in template:
            raise BadRecord("template", f"the chat template has no place for {name}")


def _rename_reasoning(template: str, conversation: Conversation) -> Conversation:
    """Rename the reasoning field to the one that the template reads. Raises BadRecord if it reads
    none and would silently ignore reasoning."""
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
    """Start indices of turns; a turn starts with user messages and ends before the next ones."""
    messages = conversation.messages
    if part == "prompt" and True in conversation.trained:
        messages = messages[: conversation.trained.index(True)]
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [i for i in starts if not i or messages[i - 1]["role"] != "user"]


def _drop_oldest_turns(
    conversation: Conversation, starts: Sequence[int], turns: int
) -> Conversation:
    """Drop the oldest turns, keeping initial system messages."""
    messages = conversation.messages
    head = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    kept = [*range(head), *range(starts[turns], len(messages))]
    return replace(
        conversation,
        messages=[messages[i] for i in kept],
        weights=tuple(conversation.weights[i] for i in kept),
    )


def _require_answers(text: str, conversation: Conversation) -> None:
    """Raise BadRecord if the end of a trained answer is not in the text.

    Only the end is compared, because templates strip text and remove reasoning. Some templates
    silently skip whole turns.
    """
    for number, message in enumerate(conversation.messages, start=1):
        if not conversation.trained[number - 1]:
            continue
        words = (message["content"] or "").rpartition("</think>")[2].strip()
        if words[-ANSWER_END:] not in text:
            raise BadRecord(
                "template",
                f"the chat template leaves out what the assistant says (message {number})",
            )


def _last_turn_weights(conversation: Conversation) -> tuple[float, ...]:
    """Restrict trained messages to those after the last user message before the last of them."""
    trained = conversation.trained
    last = max((i for i, is_trained in enumerate(trained) if is_trained), default=0)
    asked = [i for i in range(last) if conversation.messages[i]["role"] == "user"]
    start = asked[-1] if asked else 0
    return tuple(weight * (i >= start) for i, weight in enumerate(conversation.weights))


def _message_prefix(conversation: Conversation, stop: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:stop])


def _trained_runs(conversation: Conversation) -> list[tuple[int, int, float]]:
    """The fewest message ranges in which all assistant messages are trained with the same weight,
    covering all trained ones: (start, stop, weight)."""
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    starts = [0 if i == answers[0] else i for i in answers]
    ends = [*starts[1:], len(conversation.messages)]  # without answers one more than starts
    runs: list[tuple[int, int, float]] = []
    for answer, start, end in zip(answers, starts, ends, strict=False):
        weight = conversation.weights[answer]
        if runs and runs[-1][1:] == (start, weight):
            runs[-1] = runs[-1][0], end, weight
        elif weight:
            runs.append((start, end, weight))
    return runs
