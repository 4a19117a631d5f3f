"""What a run asks its model, as tokens, and what it answered, as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.rows.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Prompts:
    """Prompts and the tokenizer that they are read and answers are told with."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    end: int | None
    """The token that ends an answer."""
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: str, revision: str | None) -> "Prompts":
        """Texts as a user's messages where the tokenizer has a chat template, else as they are."""
        loaded = load_tokenizer(tokenizer, revision)
        if loaded.chat_template:
            asked = [[{"role": "user", "content": text}] for text in texts]
            rendered = [
                loaded.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
                for one in asked
            ]
            # A template writes special tokens itself.
            found = [loaded.encode(str(text), add_special_tokens=False) for text in rendered]
        else:
            found = [loaded.encode(text) for text in texts]
        end = loaded.eos_token_id
        return cls(
            tuple(texts), tuple(map(tuple, found)), end if isinstance(end, int) else None, loaded
        )

    def told(self, answers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Each prompt beside its answer, without the token that ends it."""
        found: list[dict[str, Any]] = []
        for text, answer in zip(self.texts, answers, strict=True):
            ended = bool(answer) and answer[-1] == self.end
            said = self.tokenizer.decode(list(answer[:-1] if ended else answer))
            found.append({"prompt": text, "answer": said, "tokens": len(answer), "ended": ended})
        return found
