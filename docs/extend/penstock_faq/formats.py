"""`faq_csv`: a spreadsheet of questions, with several answers in one cell."""

from typing import ClassVar

from penstock.prepare.bad_records import BadRecord, get_optional_text, get_text
from penstock.prepare.formats.conversation import Conversation, DatasetFormat, Record


class FaqCsv(DatasetFormat):
    """A question, and its answers separated by `separator`, of which the first is the best."""

    version: ClassVar[int] = 1

    question: str = "Question"
    answers: str = "Answers"
    topic: str | None = None
    """Column with the topic, which is told in the system prompt."""
    separator: str = "|"

    def parse(self, record: Record) -> Conversation:
        """The question and its best answer, on which the loss is."""
        question = get_text(record, self.question).strip()
        answer = get_text(record, self.answers).split(self.separator)[0].strip()
        if not question or not answer:
            raise BadRecord("empty", f"{self.question if not question else self.answers} is empty")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if topic := get_optional_text(record, self.topic):
            messages.insert(0, {"role": "system", "content": f"You answer questions on {topic}."})
        weights = (*[0.0] * (len(messages) - 1), 1.0)
        return Conversation(messages, None, weights)
