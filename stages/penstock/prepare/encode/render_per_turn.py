"""Render conversations whose chat template renders an answer differently when others follow.

Qwen3's template, for example, removes the reasoning from all answers except the last one. During
generation the model's own text does not change, so each answer is trained as rendered when it is
the last message; the text is the concatenation of these renderings. For a template that does not
change earlier messages, this equals the normal rendering.
"""

from collections.abc import Callable, Sequence

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.formats.conversation import REASONING, Conversation, Message

Render = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text."""

# Replaces what a message says to find the text around it; private-use characters that no template
# contains.
PLACEHOLDER = "\ue000answer\ue001"

NEEDS_MARKS = (
    "so its tokens are not known; write data.chat_template: chatml (or another name), or use a "
    "chat template with {% generation %} marks"
)


def render_per_turn(
    render: Render, conversation: Conversation, tail: str | None
) -> tuple[str, dict[int, tuple[int, int, bool]]]:
    """(text, (start, stop, whether it is words alone) of each answer by its message). `tail`: the
    text after an answer that is the last message; where it is not known, an answer is followed by
    it.

    Raises BadRecord if the template renders an answer without its generation prompt, or otherwise
    than as its text.
    """
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    text = render(messages[: answers[0]], True)
    spans: dict[int, tuple[int, int, bool]] = {}
    for answer_index, following in zip(answers, [*answers[1:], None], strict=True):
        answer = _render_answer(render, messages, answer_index)
        end, after = _render_endings(render, messages, answer_index, following)
        shown = answer.removesuffix(end) + after
        is_closed = tail is not None and answer.endswith(tail)
        answer_text = answer.removesuffix(tail) if is_closed and tail else answer
        if not (answer.endswith(end) and shown.startswith(answer_text)):
            raise BadRecord(
                "template",
                f"the chat template ends message {answer_index + 1} otherwise once others follow, "
                f"{NEEDS_MARKS}",
            )
        spans[answer_index] = len(text), len(text) + len(answer_text), is_closed
        text += shown
    return text, spans


def _render_answer(render: Render, messages: Sequence[Message], index: int) -> str:
    prompt, rendered = render(messages[:index], True), render(messages[: index + 1], False)
    if not rendered.startswith(prompt):
        raise BadRecord(
            "template",
            f"the chat template begins message {index + 1} otherwise than its own prompt for an "
            f"answer does, {NEEDS_MARKS}",
        )
    return rendered[len(prompt) :]


def _render_endings(
    render: Render, messages: Sequence[Message], index: int, following: int | None
) -> tuple[str, str]:
    """(text after an answer that is the last message; text after it up to the next answer or the
    end of the conversation)."""
    if following is None and index + 1 == len(messages):
        return "", ""
    content = {name: value for name, value in messages[index].items() if name not in REASONING}
    ahead = [*messages[:index], {**content, "content": PLACEHOLDER}]
    alone = render(ahead, False)
    rendered = render([*ahead, *messages[index + 1 : following]], following is not None)
    if [alone.count(PLACEHOLDER), rendered.count(PLACEHOLDER)] != [1, 1]:
        raise BadRecord(
            "template",
            f"the chat template shows message {index + 1} otherwise once others follow, "
            f"{NEEDS_MARKS}",
        )
    return alone.partition(PLACEHOLDER)[2], rendered.partition(PLACEHOLDER)[2]
