"""Conversations whose chat template shows an answer differently once other messages follow it.

Qwen3's template, for one, takes the reasoning out of all answers but the last one. A model that
answers never sees its text change, so what it is to learn is each answer as it was written when it
was the last: the text here is every turn as the template renders it last, one after another. Where
a template does not change what it has rendered, that is its own rendering.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.document import Span
from penstock.prepare.formats.conversation import REASONING, Conversation, Message

Render = Callable[[Sequence[Message], bool], str]
"""Messages to text; true: with the prompt for an answer at its end."""

PLACEHOLDER = "\ue000answer\ue001"
"""Stands for an answer while the text after it is looked for; no template knows its characters."""

NEEDS_MARKS = (
    "otherwise once others follow, so its tokens are not known; the chat template needs "
    "{% generation %} marks"
)


def render_per_turn(
    render: Render, conversation: Conversation, ends_turn: Callable[[str], bool]
) -> tuple[str, list[Span]]:
    """The text, and where each answer with what ends it stands in it, for every answer that is
    trained. `ends_turn` says whether a text holds a token that ends a turn.

    Raises BadRecord where the template gives an answer another prompt than it asks with, or ends it
    otherwise than it does once others follow.
    """
    messages = conversation.messages
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    text = render(messages[: answers[0]], True)
    spans: list[Span] = []
    for place, following in zip(answers, [*answers[1:], None], strict=True):
        answer = _render_answer(render, messages, place)
        end, after = _render_endings(render, messages, place, following)
        shared = _common_prefix(end, after)
        if not answer.endswith(end) or not (shared == end or ends_turn(shared)):
            raise BadRecord("template", f"the chat template ends message {place + 1} {NEEDS_MARKS}")
        start, words = len(text), answer.removesuffix(end)
        if conversation.trained[place]:
            spans.append((start, start + len(words) + len(shared)))
        text += words + after
    return text, spans


def _render_answer(render: Render, messages: Sequence[Message], place: int) -> str:
    prompt, whole = render(messages[:place], True), render(messages[: place + 1], False)
    if not whole.startswith(prompt):
        raise BadRecord(
            "template",
            f"the chat template begins message {place + 1} otherwise than its own prompt for an "
            "answer does, so its tokens are not known; the chat template needs {% generation %} "
            "marks",
        )
    return whole[len(prompt) :]


def _render_endings(
    render: Render, messages: Sequence[Message], place: int, following: int | None
) -> tuple[str, str]:
    """What stands after the words of an answer: if it is the last message; and up to the words of
    the following answer, or the end of the conversation."""
    if following is None and place + 1 == len(messages):
        return "", ""
    kept = {name: value for name, value in messages[place].items() if name not in REASONING}
    ahead = [*messages[:place], {**kept, "content": PLACEHOLDER}]
    alone = render(ahead, False)
    whole = render([*ahead, *messages[place + 1 : following]], following is not None)
    if [alone.count(PLACEHOLDER), whole.count(PLACEHOLDER)] != [1, 1]:
        raise BadRecord("template", f"the chat template shows message {place + 1} {NEEDS_MARKS}")
    return alone.partition(PLACEHOLDER)[2], whole.partition(PLACEHOLDER)[2]


def _common_prefix(one: str, other: str) -> str:
    """What both begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in pairs)
