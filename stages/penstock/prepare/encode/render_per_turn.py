"""Render conversations whose chat template renders an answer differently when others follow.

Qwen3's template, for example, removes the reasoning from all answers except the last one. During
generation the model's own text does not change, so each answer is trained as rendered when it is
the last message; the text is the concatenation of these renderings. For a template that does not
change earlier messages, this equals the normal rendering.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.document import Span
from penstock.prepare.formats.conversation import REASONING, Conversation, Message

Render = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text."""

PLACEHOLDER = "\ue000answer\ue001"
"""Replaces an answer to find the text after it; private-use characters that no template
contains."""

NEEDS_MARKS = (
    "otherwise once others follow, so its tokens are not known; the chat template needs "
    "{% generation %} marks"
)


def render_per_turn(
    render: Render, conversation: Conversation, ends_turn: Callable[[str], bool]
) -> tuple[str, list[Span]]:
    """(text, span of each trained answer with its end). `ends_turn` returns whether a text contains
    a token that ends a turn.

    Raises BadRecord if the template renders an answer without its generation prompt, or ends it
    differently when other messages follow.
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
    """(text after an answer that is the last message; text after it up to the next answer or the
    end of the conversation)."""
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
    """Longest common prefix."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in pairs)
