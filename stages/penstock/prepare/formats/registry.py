"""Table of formats by name."""

from penstock.config.schema.dataset import FormatName
from penstock.prepare.formats.alpaca import alpaca
from penstock.prepare.formats.conversation import Format
from penstock.prepare.formats.erniekit import preference_turns, sft_turns
from penstock.prepare.formats.instruction import instruction
from penstock.prepare.formats.kto import kto
from penstock.prepare.formats.messages import conversation
from penstock.prepare.formats.plain import plain
from penstock.prepare.formats.preference import preference
from penstock.prepare.formats.sharegpt import sharegpt
from penstock.prepare.formats.tokenized import tokenized

FORMATS: dict[FormatName, Format] = {
    "tokenized": tokenized,
    "chat": conversation,
    "sharegpt": sharegpt,
    "instruction": instruction,
    "alpaca": alpaca,
    "text": plain,
    "preference": preference,
    "kto": kto,
    "sft_turns": sft_turns,
    "preference_turns": preference_turns,
}
