"""`text`: documents trained whole."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.prepare.faults import BadRow, text
from penstock.prepare.formats.sample import Encoder, Record, Sample
from penstock.prepare.settings import DatasetSettings


def plain(settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The text as the tokenizer gives it (with its start token, if it adds one), then the end."""
    end = end_token(tokenizer)

    def encode_all(records: Sequence[Record]) -> list[Sample | BadRow]:
        found: list[Sample | BadRow | None] = []
        texts: list[str] = []
        for record in records:
            try:
                texts.append(_filled(record, settings.field_text))
            except BadRow as fault:
                found.append(fault)
            else:
                found.append(None)
        encoded = iter(token_ids(tokenizer, texts, add_special_tokens=True))
        return [entry or _whole(next(encoded), end) for entry in found]

    return encode_all


def _filled(record: Record, name: str) -> str:
    value = text(record, name)
    if value.strip():
        return value
    raise BadRow("empty", f"{name} is empty")


def token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of several texts at once."""
    if not texts:
        return []
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return encoded["input_ids"]


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the end-of-sequence token. Raises StageError where there is none."""
    end = tokenizer.eos_token_id
    if isinstance(end, int):
        return end
    raise StageError(
        "The tokenizer has no end-of-sequence token, so nothing would teach the model to stop.\n"
        "  Set eos_token in its tokenizer_config.json, or use data of type tokenized."
    )


def _whole(ids: list[int], end: int) -> Sample:
    ended = ids if ids and ids[-1] == end else [*ids, end]
    return Sample.where(ended, [1] * len(ended))
