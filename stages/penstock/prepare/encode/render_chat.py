"""Render conversations with the chat template, and mark the assistant's text.

The tokens of a conversation are those of its whole text. Trained are the words of the assistant,
and the token that ends its turn (`turn_ends`); not the text that the template adds after it.

The words come from `{% generation %}` blocks of the chat template. Without them, they are the
difference of two renderings: the messages before them with the generation prompt, and the messages
up to them, without what the template writes after an answer; both must be prefixes of the whole
text. If they are not, the conversation is rendered turn by turn (`render_per_turn`). The words of
other roles are where a placeholder is in the text with the placeholder in their place.

Without a chat template, a prompt and its answer are plain text, separated by a blank line.
"""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from penstock.core.errors import ConfigError
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.chat_templates.compiled import Block, compile_template
from penstock.prepare.chat_templates.resolve import SUFFIX, TEMPLATES, template_names
from penstock.prepare.encode.document import Document, Span
from penstock.prepare.encode.find_turns import (
    PROBE,
    TEMPLATE_ERRORS,
    FindAnswers,
    Form,
    TurnFinder,
)
from penstock.prepare.encode.images import SliceImages, with_parts, without_digests
from penstock.prepare.encode.turn_ends import Turn, TurnEnds
from penstock.prepare.formats.conversation import REASONING, Conversation, Message
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.unread_columns import reads_key

log = logging.getLogger("penstock.prepare")

ANSWER_END = 16
"""Number of final characters of an answer that must be in the rendered text."""

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")

STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

# Fixed date for templates that call `strftime_now`, so that tokens do not change from day to day.
# It is the fallback date of Llama's templates.
DATE = date(2024, 7, 26)

BREAK = "\n\n"
"""Separator of the parts of a conversation without a chat template."""

_Part = Literal["any", "prompt"]
"""The part of a conversation from which turns may be dropped."""

NO_TEMPLATE = "the tokenizer has no chat template"


class Renderer:
    """Renders conversations to documents with a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: DatasetSettings,
        images: SliceImages | None = None,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """`images`: the media of the conversations, whose media are their digests.
        `stop_token_ids`: those of the generation config."""
        self._tokenizer = tokenizer
        self._its = settings
        self._images = images
        variables = settings.chat_template.variables if settings.chat_template else {}
        # apply_chat_template passes the special tokens, too: templates write bos_token themselves.
        self._names: dict[str, Any] = {**tokenizer.special_tokens_map, **variables}
        self._arguments = self._names
        """Variables of the template for the conversation that is rendered."""
        self._finder = TurnFinder(self._apply_template, TurnEnds(tokenizer, stop_token_ids))
        self._may_drop = (
            settings.truncation_mode == "drop_turns" and settings.max_seq_len is not None
        )
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

    def _render(self, full_conversation: Conversation, part: _Part, turns: int) -> Document:
        conversation = (
            _drop_oldest_turns(full_conversation, _turn_starts(full_conversation, part), turns)
            if turns
            else full_conversation
        )
        if self._tokenizer.chat_template:
            document = self._render_template(conversation)
        else:
            document = self._render_plain(conversation)
        if not document.spans:
            raise BadRecord("no_trained_tokens", "nothing in it is the assistant's to be trained")
        if self._images:
            document = self._images.expand(document, conversation.media)
        if self._may_drop and not turns:
            document.droppable_turns = max(0, len(_turn_starts(full_conversation, part)) - 1)
            document.drop_turns = partial(self._render, full_conversation, part)
        return document

    def _render_plain(self, conversation: Conversation) -> Document:
        messages = conversation.messages
        roles = [message["role"] for message in messages]
        if roles[-2:] != ["user", "assistant"] or set(roles[:-2]) - {"system"}:
            names = ", ".join(roles)
            raise BadRecord("template", f"{NO_TEMPLATE}, so turns of {names} have no form")
        if conversation.media:
            raise BadRecord("template", f"{NO_TEMPLATE}, so media have no form")
        if conversation.tools or any(message.get("tool_calls") for message in messages):
            raise BadRecord("template", f"{NO_TEMPLATE}, so tools have no form")
        parts = [str(message["content"]) for message in messages]
        prompt = [i for i, part in enumerate(parts[:-1]) if part] or [0]
        text, spans = "", list[Span]()
        for i in (*prompt, len(parts) - 1):
            if conversation.trained[i]:
                ranges = conversation.ranges.get(i, [(0, len(parts[i]))])
                spans += [Span(len(text) + a, len(text) + b, i) for a, b in ranges if a < b]
            text += parts[i] if i == len(parts) - 1 else parts[i] + BREAK
        return _build_document(text, spans, conversation)

    def _render_template(self, conversation: Conversation) -> Document:
        self._arguments = {**self._names, **conversation.template_kwargs}
        own: Any = conversation.tools
        template = self._template(self._chat_template(own))
        # Messages of a role and a content alone have neither calls nor reasoning.
        if any(len(message) > 2 for message in conversation.messages) or own:
            _require_tool_support(template.text, conversation)
            conversation = _rename_reasoning(template.text, conversation)
        try:
            text, turns = self._render_turns(template, conversation)
        except TEMPLATE_ERRORS as error:
            raise BadRecord("template", f"the chat template refuses it: {error}") from error
        _require_answers(text, conversation)
        return self._trained_document(text, turns, conversation)

    def _render_turns(
        self, template: "_Template", conversation: Conversation
    ) -> tuple[str, list[Turn]]:
        """The whole text, with the turns of trained messages, or of all for `train_on_eos: all`."""
        ends_all = self._its.trained_ends == "all"
        answers: list[int] = []
        unlocated: list[int] = []
        for i, message in enumerate(conversation.messages):
            if ends_all or conversation.weights[i]:
                (answers if message["role"] == "assistant" else unlocated).append(i)
        mode, is_per_turn = self._its.turn_rendering, False
        find: FindAnswers = self._finder.by_prefix
        if template.is_marked:
            find = self._finder.marked
        elif answers and mode == "per_turn":
            find, is_per_turn = self._finder.per_turn, True
        rendering = find(template.text, conversation, answers)
        if rendering is None and mode == "auto":
            find, is_per_turn = self._finder.per_turn, True
            rendering = find(template.text, conversation, answers)
        if rendering is None:
            raise BadRecord(
                "template",
                "the chat template renders answers differently once others follow, so their tokens "
                "are not known; write data.turn_rendering: per_turn, or use a chat template with "
                "{% generation %} marks",
            )
        if is_per_turn:
            self._count_per_turn()
        text, turns = rendering
        for message_index in unlocated:
            turn = self._finder.locate(
                template.text, conversation, message_index, answers, find, text
            )
            turns += [turn] if turn else []
        if conversation.ranges:
            turns = [
                self._finder.with_ranges(template.text, conversation, turn, answers, find, text)
                for turn in turns
            ]
        if unlocated:
            turns.sort(key=lambda turn: turn.start)
        return text, turns

    def _count_per_turn(self) -> None:
        if self._its.turn_rendering == "auto" and not self.num_per_turn:
            log.warning(
                "The chat template renders answers differently when other messages follow. Such "
                "conversations are rendered turn by turn, each answer as if it were the last "
                "message (data.turn_rendering: whole drops them)."
            )
        self.num_per_turn += 1

    def _trained_document(
        self, text: str, turns: Sequence[Turn], conversation: Conversation
    ) -> Document:
        """The text with the spans that `roles_to_train` and `train_on_eos` choose."""
        ends, weights = self._its.trained_ends, conversation.weights
        last = max((turn.message for turn in turns if weights[turn.message]), default=-1)
        lacks_end = False
        spans: list[Span] = []
        for turn in turns:
            message, is_trained = turn.message, weights[turn.message] > 0
            is_answer = conversation.messages[message]["role"] == "assistant"
            wants_end = ends == "all" or (
                is_trained and (ends == "turn" or (ends == "last" and message == last))
            )
            end = turn.end if wants_end else None
            lacks_end |= is_trained and is_answer and wants_end and end is None
            word_range = turn.start, turn.words_end
            if not is_trained:
                end_ranges = [end] if end else []
            elif turn.ranges is not None:
                end_ranges = [*turn.ranges, *([end] if end else [])]
            elif end and is_answer:
                # Also what is between, which the model must write before it can end the turn.
                end_ranges = [*turn.earlier, (turn.start, end[1])]
            else:
                end_ranges = [*turn.earlier, word_range, *([end] if end else [])]
            spans += [Span(start, stop, message) for start, stop in end_ranges if start < stop]
        return _build_document(text, spans, conversation, lacks_end=lacks_end)

    def _chat_template(self, tools: Any) -> str:
        """The template of the settings, or the processor's for data with images, as
        transformers."""
        if self._its.chat_template and self._its.chat_template.text is not None:
            return self._its.chat_template.text
        own = self._images and self._images.chat_template
        return own or self._tokenizer.get_chat_template(tools=tools)

    def _template(self, text: str) -> "_Template":
        if text not in self._templates:
            dated = STRFTIME_NOW.sub(lambda match: repr(DATE.strftime(match[2])), text)
            is_marked = bool(GENERATION_BLOCK.search(text))
            self._templates[text] = _Template(dated, is_marked)
            if self._images and not self._shows_text(dated):
                self._parts_only.add(dated)
            if not is_marked and self._its.trained_ends in ("turn", "all"):
                self._require_known_ends(dated)
        return self._templates[text]

    def _require_known_ends(self, template: str) -> None:
        """Raise ConfigError if the token that ends an answer that others follow cannot be told, and
        an included template renders the same text and marks it."""
        roles = ("user", "assistant") * 2
        messages = [
            {"role": role, "content": content} for role, content in zip(roles, "abcd", strict=True)
        ]
        conversation = Conversation(messages, None, (0.0, 1.0) * 2)
        try:
            text, turns = self._finder.by_prefix(template, conversation, [1, 3]) or ("", [])
        except (BadRecord, *TEMPLATE_ERRORS):
            return
        if not turns or turns[0].end or not turns[1].end:
            return
        for name in template_names():
            marked = self._template((TEMPLATES / f"{name}{SUFFIX}").read_text(encoding="utf-8"))
            try:
                same, marked_turns = self._finder.marked(marked.text, conversation, [1, 3])
            except TEMPLATE_ERRORS:
                continue
            if same == text and marked_turns[0].end:
                raise ConfigError(
                    "The tokenizer's chat template ends an answer with another token once others "
                    "follow, so its end is not known.\n"
                    f"  Write data.chat_template: {name}, which renders the same text and marks "
                    "what is trained."
                )

    def _shows_text(self, template: str) -> bool:
        """Whether a template shows a content that is text, rather than a list of parts."""
        message = {"role": "user", "content": PROBE}
        try:
            [text], _ = self._apply_template(template, [[message]], None, "closed")
        except TEMPLATE_ERRORS:
            return False
        return PROBE in text

    def _apply_template(
        self,
        template: str,
        conversations: Sequence[Sequence[Message]],
        tools: list[dict[str, Any]] | None,
        form: Form,
    ) -> tuple[list[str], list[list[Block]]]:
        if not conversations:
            return [], []
        shown = [[_drop_nulls(message) for message in messages] for messages in conversations]
        if self._images:
            shown = [[without_digests(message) for message in messages] for messages in shown]
        if template in self._parts_only:
            shown = [[with_parts(message) for message in messages] for messages in shown]
        variables = {
            "tools": tools,
            "add_generation_prompt": form == "asking",
            **self._arguments,
        }
        compiled = compile_template(template)
        if form != "marked":
            return [compiled.render(messages, variables) for messages in shown], []
        rendered = [compiled.render_marked(messages, variables) for messages in shown]
        return [text for text, _ in rendered], [blocks for _, blocks in rendered]


@dataclass(frozen=True)
class _Template:
    text: str
    is_marked: bool
    """Whether it has generation blocks."""


def _build_document(
    text: str, spans: Sequence[Span], conversation: Conversation, *, lacks_end: bool = False
) -> Document:
    """A document with the loss weight of each span; 1 for ends of turns that are not trained."""
    weights = None
    if not {0.0, 1.0}.issuperset(conversation.weights):
        weights = tuple(conversation.weights[span.message] or 1.0 for span in spans)
        weights = weights if any(weight != 1 for weight in weights) else None
    return Document(text, tuple(spans), weights=weights, lacks_end=lacks_end)


def _drop_nulls(message: Message) -> Message:
    # Jinja takes a null for defined: `is defined` and `"tool_calls" in message` would hold.
    if None not in message.values():
        return message
    return {name: value for name, value in message.items() if value is not None}


def _require_tool_support(template: str, conversation: Conversation) -> None:
    are_called = any("tool_calls" in message for message in conversation.messages)
    for name, is_there in (("tools", conversation.tools), ("tool_calls", are_called)):
        # Such a template would silently leave them out.
        if is_there and name not in template:
            raise BadRecord("template", f"the chat template has no place for {name}")


def _rename_reasoning(template: str, conversation: Conversation) -> Conversation:
    """Give reasoning the name that the template reads, and those that transformers adds. Raises
    BadRecord if the template reads none and would silently ignore reasoning."""
    if not any(name in message for message in conversation.messages for name in REASONING):
        return conversation
    read = [name for name in REASONING if reads_key(template, name)]
    if not read:
        raise BadRecord("template", "the chat template has no place for reasoning")
    messages: list[Message] = []
    for message in conversation.messages:
        has = [name for name in REASONING if name in message]
        if has:
            reasoning = message[has[0]]
            if not set(has) & set(read):
                fields = {name: value for name, value in message.items() if name not in has}
                message = {**fields, read[0]: reasoning}
            # As _alias_reasoning_fields of transformers 5.23, which CompiledTemplate does not go
            # through.
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
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
    kept_indices = [*range(head), *range(starts[turns], len(messages))]
    return replace(
        conversation,
        messages=[messages[i] for i in kept_indices],
        weights=tuple(conversation.weights[i] for i in kept_indices),
        ranges={
            new: conversation.ranges[i]
            for new, i in enumerate(kept_indices)
            if i in conversation.ranges
        },
    )


def _require_answers(text: str, conversation: Conversation) -> None:
    """Raise BadRecord if the end of a trained answer is not in the text."""
    weights = conversation.weights
    for number, message in enumerate(conversation.messages, start=1):
        if not weights[number - 1] or message["role"] != "assistant":
            continue
        answer = (message["content"] or "").rpartition("</think>")[2].strip()
        # Some templates silently skip whole turns. Only the end is compared, because templates
        # strip text and remove reasoning.
        if answer[-ANSWER_END:] not in text:
            raise BadRecord(
                "template",
                f"the chat template leaves out what the assistant says (message {number})",
            )


def _last_turn_weights(conversation: Conversation) -> tuple[float, ...]:
    """Restrict trained messages to those after the last user message before the last of them."""
    trained = conversation.trained
    last = max((i for i, is_trained in enumerate(trained) if is_trained), default=0)
    questions = [i for i in range(last) if conversation.messages[i]["role"] == "user"]
    start = questions[-1] if questions else 0
    return tuple(weight * (i >= start) for i, weight in enumerate(conversation.weights))
