"""Special tokens around texts that no chat template writes."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.prepare.encode.backends import special_token_affixes
from penstock.prepare.encode.document import Document
from penstock.prepare.encode.ragged import LabeledTokens, TokenSequences
from penstock.prepare.settings import DatasetSettings
from penstock.rows.schema import IGNORED


class SpecialTokens:
    """Adds special tokens around texts without a chat template, which would write them itself."""

    def __init__(
        self,
        settings: DatasetSettings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        has_images: bool = False,
    ) -> None:
        """`has_images`: texts with a chat template get the tokens that transformers' processors add
        unless a text begins with the BOS token."""
        self._affixes = special_token_affixes(tokenizer) if has_images else ([], [])
        self._begin = tokenizer.bos_token
        self._end = tokenizer.eos_token_id
        self._masks_end = settings.trained_ends == "none"
        is_text = settings.type == "text"
        self._is_plain = is_text or (settings.type != "tokenized" and not tokenizer.chat_template)
        before, after = special_token_affixes(tokenizer) if self._is_plain else ([], [])
        if self._is_plain and settings.add_eos:
            end = _require_eos(tokenizer)
            after = after if after[-1:] == [end] else [*after, end]
        is_trained = [not (token == self._end and self._masks_end) for token in after]
        self._adds_bos = before[:1] == [tokenizer.bos_token_id]
        self._before = _to_labeled(before, [is_text] * len(before))
        self._after = _to_labeled(after, is_trained)

    def repeats_bos(self, text: str) -> bool:
        """Whether a text begins with the BOS token that the tokenizer would add."""
        return self._adds_bos and text.startswith(str(self._begin))

    def add(self, flat: TokenSequences, documents: Sequence[Document]) -> TokenSequences:
        """Add special tokens to every text; one that begins with BOS or ends with EOS gets no
        second one."""
        if any(self._affixes):
            return self._add_affixes(flat, documents)
        if not self._is_plain:
            return flat
        begun = [i for i, document in enumerate(documents) if self.repeats_bos(document.text)]
        # Its own goes, since `add_affixes` gives one to each text.
        flat = flat.replace({i: flat[i].cut(slice(1, None)) for i in begun})
        is_ended = np.zeros(len(flat), dtype=np.bool_)
        filled = flat.lengths > 0
        is_ended[filled] = flat.ids[flat.offsets[1:][filled] - 1] == self._end
        if is_ended.any():
            replacements: dict[int, LabeledTokens] = {}
            for index in np.flatnonzero(is_ended).tolist():
                tokens = flat[index]
                if self._after[0][-1:].tolist() == [self._end]:
                    replacements[index] = tokens.cut(slice(-1))
                elif self._masks_end:
                    labels = np.append(tokens.labels[:-1], np.int32(IGNORED))
                    replacements[index] = tokens._replace(labels=labels)
            flat = flat.replace(replacements)
        weights = [document.weights[-1] if document.weights else 1.0 for document in documents]
        is_weighted = any(document.weights for document in documents)
        of_ends = np.array(weights, dtype=np.float32) if is_weighted else None
        return flat.add_affixes(self._before, self._after, of_ends)

    def _add_affixes(self, flat: TokenSequences, documents: Sequence[Document]) -> TokenSequences:
        before, after = (_to_labeled(ids, [False] * len(ids)) for ids in self._affixes)
        replacements: dict[int, LabeledTokens] = {}
        for index, document in enumerate(documents):
            if self._begin is None or not document.text.startswith(str(self._begin)):
                joined = TokenSequences.from_list([before, flat[index], after])
                replacements[index] = LabeledTokens(joined.ids, joined.labels, joined.weights)
        return flat.replace(replacements)


def _to_labeled(tokens: list[int], trained: list[bool]) -> LabeledTokens:
    ids = np.array(tokens, dtype=np.int32)
    labels = np.where(np.array(trained, dtype=np.bool_), ids, np.int32(IGNORED))
    return LabeledTokens(ids, labels)


def _require_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    end = tokenizer.eos_token_id
    if isinstance(end, int):
        return end
    raise StageError(
        "The tokenizer has no end-of-sequence token, so the model would not learn to stop.\n"
        "  Set eos_token in its tokenizer_config.json, or set data.add_eos to false."
    )
