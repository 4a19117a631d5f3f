"""The one table of formats."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from penstock.prepare.formats.chat import chat
from penstock.prepare.formats.instruction import instruction
from penstock.prepare.formats.plain import plain
from penstock.prepare.formats.sample import Encoder
from penstock.prepare.formats.tokenized import tokenized
from penstock.prepare.settings import DatasetSettings

FORMATS: dict[str, Callable[[DatasetSettings, PreTrainedTokenizerBase], Encoder]] = {
    "tokenized": tokenized,
    "chat": chat,
    "instruction": instruction,
    "text": plain,
}


def encoder(settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """How records of this data set become samples. Raises StageError if the tokenizer cannot."""
    return FORMATS[settings.type](settings, tokenizer)
