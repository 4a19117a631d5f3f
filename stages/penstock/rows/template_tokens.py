"""Chat templates and the tokens of a tokenizer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

# Private-use characters, which no template contains.
PROBE = "\ue000answer\ue001"


def locate_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where a tokenizer's own chat template is, for messages."""
    folder = Path(tokenizer.name_or_path)
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            return str(folder / name)
    return f"the tokenizer {tokenizer.name_or_path}"


def end_of_turn(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> int | None:
    """Id of the special token that the tokenizer's chat template writes after an answer, if any."""
    end = _render_probe(tokenizer, variables).rpartition(PROBE)[2]
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    token_ids = tokenizer.encode(end, add_special_tokens=False)
    return next((token_id for token_id in token_ids if token_id in special), None)


def cut_tokens(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> list[str]:
    """Texts in the tokenizer's chat template that look like special tokens, and that the tokenizer
    encodes as several tokens."""
    texts = f"{tokenizer.get_chat_template()}{_render_probe(tokenizer, variables)}"
    likely = dict.fromkeys(SPECIAL_LIKE.findall(texts))
    return [token for token in likely if len(tokenizer.encode(token, add_special_tokens=False)) > 1]


SPECIAL_LIKE = re.compile(
    r"<\|[^|<>\s'+]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|<(?:start|end)_of_\w+>|\[/?g?[A-Z_]{4,}\]"
)
"""Texts that are single tokens of the models that templates are written for."""


def _render_probe(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> str:
    """A question and the answer `PROBE` by the tokenizer's chat template; empty if it refuses
    them."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        [text], _ = render_jinja_template(
            [messages],
            chat_template=tokenizer.get_chat_template(),
            **{**tokenizer.special_tokens_map, **variables},
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return ""
    return str(text)
