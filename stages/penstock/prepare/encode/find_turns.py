"""Find the turns of messages in the text of a conversation.

Of an answer: by the generation blocks of the template (`marked`); as the difference of the
renderings of the messages before it and up to it (`by_prefix`); or rendered as if it were the last
message (`per_turn`). Of another message (`locate`): where a placeholder is in the text that the
conversation has with the placeholder in place of what the message says.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from jinja2 import TemplateError

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.chat_templates.compiled import Block
from penstock.prepare.encode.locate_ranges import locate_ranges
from penstock.prepare.encode.render_per_turn import NEEDS_MARKS, PLACEHOLDER, render_per_turn
from penstock.prepare.encode.turn_ends import Turn, TurnEnds
from penstock.prepare.formats.conversation import Conversation, Message

Form = Literal["marked", "closed", "asking"]
"""`marked`: with generation blocks; `asking`: with the generation prompt."""

ApplyTemplate = Callable[
    [str, Sequence[Sequence[Message]], list[dict[str, Any]] | None, Form],
    tuple[list[str], list[list[Block]]],
]
"""(template, conversations, tools, form) -> (texts, generation blocks of each)."""

FindAnswers = Callable[[str, Conversation, Sequence[int]], tuple[str, list[Turn]] | None]
"""(template, conversation, answers) -> (text, turns of these answers)."""

# Jinja compiles templates to Python, whose errors come through: `1 + "a"` is a TypeError.
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

PROBE = "\ue000text\ue001"
"""A text that no template has itself."""


class TurnFinder:
    """Renders conversations, and finds turns in their text."""

    def __init__(self, apply: ApplyTemplate, ends: TurnEnds) -> None:
        self._apply = apply
        self._ends = ends
        self._tails: dict[str, str | None] = {}
        self._marked_tails: dict[str, str | None] = {}

    def marked(
        self, template: str, conversation: Conversation, answers: Sequence[int]
    ) -> tuple[str, list[Turn]]:
        """Answers by generation blocks. A block may or may not contain what ends the turn."""
        [text], [blocks] = self._render(template, conversation, [None], "marked")
        tail = self._marked_tail(template)
        turns: list[Turn] = []
        for message, own in self._blocks_of(template, conversation, answers, blocks):
            if not own:
                continue
            *earlier, (start, stop) = own if len(own) == 1 else _join_adjacent(own)
            is_closed = tail is not None and text.endswith(tail, start, stop)
            words_end = stop - len(tail or "") if is_closed else None
            turns.append(
                self._turn(template, message, text, start, stop, tuple(earlier), words_end)
            )
        return text, turns

    def by_prefix(
        self, template: str, conversation: Conversation, answers: Sequence[int]
    ) -> tuple[str, list[Turn]] | None:
        """None if the template renders an answer differently once others follow."""
        num_messages = len(conversation.messages)
        # The whole conversation, and the prefixes that end with an answer.
        ends = [num_messages, *(turn + 1 for turn in answers if turn + 1 < num_messages)]
        (text, *closed), _ = self._render(template, conversation, ends, "closed")
        after = dict(zip(ends, [text, *closed], strict=True))
        prompted = [turn for turn in answers if turn]
        asking, _ = self._render(template, conversation, prompted, "asking")
        before = dict(zip(prompted, asking, strict=True))
        tail = self._tail(template)
        turns: list[Turn] = []
        for turn in answers:
            alone, prompt = after[turn + 1], before.get(turn, "")
            is_closed = tail is not None and alone.endswith(tail)
            answer = alone.removesuffix(tail) if is_closed and tail else alone
            # As with Qwen3's, which takes reasoning out of answers once others follow.
            if not (answer.startswith(prompt) and text.startswith(answer)):
                return None
            start = len(prompt) if turn else self._first_words(template, conversation, text)
            words_end = len(answer) if is_closed else None
            turns.append(self._turn(template, turn, text, start, len(answer), (), words_end))
        return text, turns

    def per_turn(
        self, template: str, conversation: Conversation, answers: Sequence[int]
    ) -> tuple[str, list[Turn]]:
        """Each answer as if it were the last message."""

        def render(messages: Sequence[Message], is_asking: bool) -> str:
            form = "asking" if is_asking else "closed"
            [text], _ = self._apply(template, [messages], conversation.tools, form)
            return text

        text, spans = render_per_turn(render, conversation, self._tail(template))
        turns: list[Turn] = []
        for turn in answers:
            start, stop, is_words = spans[turn]
            words_end = stop if is_words else None
            turns.append(self._turn(template, turn, text, start, stop, (), words_end))
        return text, turns

    def locate(
        self,
        template: str,
        conversation: Conversation,
        message: int,
        answers: Sequence[int],
        find: FindAnswers,
        text: str,
    ) -> Turn | None:
        """The turn of a message that is not the assistant's, in the `text` of `find`; None for one
        without words. Raises BadRecord if its words are not at one place of the text."""
        masked = _with_probe(conversation, message)
        if masked is conversation:
            return None
        shown, _ = find(template, masked, answers) or ("", [])
        if PROBE not in shown:
            raise self._not_located(conversation, message, "leaves out")
        before, after = shown.partition(PROBE)[0], shown.rpartition(PROBE)[2]
        start, words_end = len(before), len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and start <= words_end):
            raise self._not_located(conversation, message, "shows at several places")
        [alone], _ = self._render(template, masked, [message + 1], "closed")
        closing = self._ends.closing(self._tail(template) or "")
        tail = alone.rpartition(PROBE)[2]
        return Turn(
            message, start, words_end, self._ends.find_token(text, words_end, tail, closing)
        )

    def with_ranges(
        self,
        template: str,
        conversation: Conversation,
        turn: Turn,
        answers: Sequence[int],
        find: FindAnswers,
        text: str,
    ) -> Turn:
        """The turn with the ranges of its words that are trained, if its message has some; `text`
        is that of `find`. Raises BadRecord if they are not at one place of the text."""
        ranges = conversation.ranges.get(turn.message)
        if ranges is None or not conversation.trained[turn.message]:
            return turn
        message = conversation.messages[turn.message]

        def render(content: str) -> str | None:
            messages = [*conversation.messages]
            messages[turn.message] = {**message, "content": content}
            text_turns = find(template, replace(conversation, messages=messages), answers)
            return text_turns and text_turns[0]

        word_range = min([turn.start, *(start for start, _ in turn.earlier)]), turn.words_end
        located = locate_ranges(str(message["content"]), ranges, text, word_range, render)
        if located is None:
            raise BadRecord(
                "template",
                f"the chat template changes what message {turn.message + 1} says, so it is not "
                "known which of its tokens are the characters to be trained; train it whole, or "
                "use another chat template",
            )
        return replace(turn, ranges=tuple(located))

    @staticmethod
    def _not_located(conversation: Conversation, message: int, reason: str) -> BadRecord:
        role = conversation.messages[message]["role"]
        return BadRecord(
            "template",
            f"the chat template {reason} what the {role} says (message {message + 1}), so its "
            f"tokens are not known; leave {role} out of roles_to_train, or use another chat "
            "template",
        )

    def _turn(
        self,
        template: str,
        message: int,
        text: str,
        start: int,
        stop: int,
        earlier: tuple[Block, ...] = (),
        words_end: int | None = None,
    ) -> Turn:
        """An answer in [start, stop), whose words end at `words_end`; None: they end within, before
        what ends the turn."""
        tail = self._tail(template)
        if words_end is None:
            words_end = self._ends.words_end(text, start, stop, tail)
        end = self._ends.find_end(text, words_end, stop, tail)
        return Turn(message, start, words_end, end, earlier)

    def _tail(self, template: str) -> str | None:
        """The text after an answer that is the last message; None if it is not known."""
        if template not in self._tails:
            text, _ = self._probe(template, "closed")
            is_shown = text.count(PLACEHOLDER) == 1
            self._tails[template] = text.partition(PLACEHOLDER)[2] if is_shown else None
        return self._tails[template]

    def _marked_tail(self, template: str) -> str | None:
        """The part of the tail that is in the generation block; None if it is not known."""
        if template not in self._marked_tails:
            text, blocks = self._probe(template, "marked")
            words_end = text.find(PLACEHOLDER) + len(PLACEHOLDER)
            tails = [text[words_end:stop] for start, stop in blocks if start < words_end <= stop]
            self._marked_tails[template] = tails[0] if len(tails) == 1 else None
        return self._marked_tails[template]

    def _probe(self, template: str, form: Form) -> tuple[str, list[Block]]:
        """A conversation whose answer is the placeholder; empty if the template refuses it."""
        question = {"role": "user", "content": PROBE}
        answer = {"role": "assistant", "content": PLACEHOLDER}
        try:
            [text], blocks = self._apply(template, [[question, answer]], None, form)
        except TEMPLATE_ERRORS:
            return "", []
        return text, blocks[0] if blocks else []

    def _blocks_of(
        self,
        template: str,
        conversation: Conversation,
        answers: Sequence[int],
        blocks: Sequence[Block],
    ) -> Iterator[tuple[int, Sequence[Block]]]:
        num_messages = len(conversation.messages)
        every = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        if len(blocks) == len(every):
            if len(answers) == len(every):
                yield from ((i, [block]) for i, block in zip(answers, blocks, strict=True))
                return
            block_of = dict(zip(every, blocks, strict=True))
            yield from ((i, [block_of[i]]) for i in answers)
            return
        # A message may have any number of blocks, so count those of the messages before it.
        following = dict(zip(every, [*every[1:], num_messages], strict=True))
        ends = sorted({end for i in answers for end in (i, following[i])} - {0, num_messages})
        _, before = self._render(template, conversation, ends, "marked")
        counts = {0: 0, num_messages: len(blocks)}
        counts |= {end: len(blocks) for end, blocks in zip(ends, before, strict=True)}
        for i in answers:
            yield i, blocks[counts[i] : counts[following[i]]]

    def _first_words(self, template: str, conversation: Conversation, text: str) -> int:
        """Start of the words of an answer that is the first message, before which templates have no
        prompt."""
        masked = _with_probe(conversation, 0)
        [shown], _ = self._render(template, masked, [None], "closed")
        before, is_shown, _ = shown.partition(PROBE)
        if not (is_shown and text.startswith(before)):
            raise BadRecord(
                "template", f"it begins with the assistant in an unknown place, {NEEDS_MARKS}"
            )
        return len(before)

    def _render(
        self,
        template: str,
        conversation: Conversation,
        ends: Sequence[int | None],
        form: Form,
    ) -> tuple[list[str], list[list[Block]]]:
        """Render the messages up to each of `ends`, as `apply_chat_template` does, with the
        generation blocks."""
        beginnings = [conversation.messages[:end] for end in ends]
        return self._apply(template, beginnings, conversation.tools, form)


def _with_probe(conversation: Conversation, index: int) -> Conversation:
    """The conversation with `PROBE` in place of what a message says; itself if that is nothing."""
    message = conversation.messages[index]
    content = message["content"]
    if isinstance(content, list):
        texts = [part.get("text", "") for part in content]
        parts = [{**part, "text": PROBE} if "text" in part else part for part in content]
        masked: Message = {**message, "content": parts}
    else:
        texts, masked = [content or ""], {**message, "content": PROBE}
    if not any(text.strip() for text in texts):
        return conversation
    messages = [*conversation.messages[:index], masked, *conversation.messages[index + 1 :]]
    return replace(conversation, messages=messages)


def _join_adjacent(blocks: Sequence[Block]) -> list[Block]:
    joined: list[Block] = []
    for start, stop in blocks:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined
