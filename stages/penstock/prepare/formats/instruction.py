"""`instruction`: a question and its answer, trained on the answer.

With a chat template they are a conversation of two turns; without one they are plain text, the
parts of the question divided by blank lines, and the answer ends with the end-of-sequence token.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from penstock.prepare.faults import BadRow, optional_text, text
from penstock.prepare.formats.chat import Message, conversations
from penstock.prepare.formats.plain import end_token, token_ids
from penstock.prepare.formats.sample import Encoder, Record, Sample, each
from penstock.prepare.settings import DatasetSettings

BREAK = "\n\n"


def instruction(settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Columns `field_instruction`, `field_output`, and if named `field_input`, `field_system`."""
    if not tokenizer.chat_template:
        return _without_template(settings, tokenizer)
    encode = conversations(tokenizer)

    def encode_all(records: Sequence[Record]) -> list[Sample | BadRow]:
        found: list[list[Message] | BadRow] = []
        for record in records:
            try:
                system, question, answer = _parts(settings, record)
            except BadRow as fault:
                found.append(fault)
                continue
            turns = [("system", system)] if system else []
            turns += [("user", question), ("assistant", answer)]
            found.append([{"role": role, "content": content} for role, content in turns])
        return encode(found)

    return encode_all


def _without_template(settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    end = end_token(tokenizer)

    def encode(record: Record) -> Sample:
        system, question, answer = _parts(settings, record)
        prompt = BREAK.join([part for part in (system, question) if part]) + BREAK
        [asked] = token_ids(tokenizer, [prompt], add_special_tokens=True)
        [answered] = token_ids(tokenizer, [answer], add_special_tokens=False)
        if asked and asked[-1] == end:
            asked.pop()  # the tokenizer closes every text; this one goes on
        answered.append(end)
        return Sample.where(asked + answered, [0] * len(asked) + [1] * len(answered))

    def encode_all(records: Sequence[Record]) -> list[Sample | BadRow]:
        return each(encode, records)

    return encode_all


def _parts(settings: DatasetSettings, record: Record) -> tuple[str, str, str]:
    """System prompt, question with its context, and answer."""
    question = text(record, settings.field_instruction)
    answer = text(record, settings.field_output)
    for name, value in (
        (settings.field_instruction, question),
        (settings.field_output, answer),
    ):
        if not value.strip():
            raise BadRow("empty", f"{name} is empty")
    context = optional_text(record, settings.field_input)
    system = optional_text(record, settings.field_system)
    return system, BREAK.join([part for part in (question, context) if part]), answer
