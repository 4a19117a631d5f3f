"""`instruction`: an instruction and its output; the output is trained."""

from penstock.prepare.bad_records import BadRecord, get_optional_text, get_text
from penstock.prepare.formats.conversation import Conversation, Message, Record
from penstock.prepare.settings import DatasetSettings

BREAK = "\n\n"
"""Between a question and its context."""


def instruction(settings: DatasetSettings, record: Record) -> Conversation:
    """Parse `field_instruction` and `field_output`, and `field_input` and `field_system` if set."""
    question = get_text(record, settings.field_instruction)
    answer = get_text(record, settings.field_output)
    for name, value in (
        (settings.field_instruction, question),
        (settings.field_output, answer),
    ):
        if not value.strip():
            raise BadRecord("empty", f"{name} is empty")
    context = get_optional_text(record, settings.field_input)
    system = get_optional_text(record, settings.field_system)
    prompt = BREAK.join([part for part in (question, context) if part])
    return question_and_answer(system, prompt, answer)


def question_and_answer(system: str, question: str, answer: str) -> Conversation:
    """Build a conversation of an optional system prompt, a question and a trained answer."""
    turns = [("system", system)] if system else []
    turns += [("user", question), ("assistant", answer)]
    messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
    return Conversation(messages, None, (False,) * (len(messages) - 1) + (True,))
