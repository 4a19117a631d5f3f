"""Chat templates and the tokens of a tokenizer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

PROBE = "\ue000answer\ue001"
"""Private-use characters, which no template contains."""


def locate_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where a tokenizer's own chat template is, for messages."""
    folder = Path(tokenizer.name_or_path)
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            return str(folder / name)
    return f"the tokenizer {tokenizer.name_or_path}"


def end_of_turn(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> int | None:
    """Id of the special token that the tokenizer's chat template writes after an answer, if any.

    Raises the errors of the template."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    [text], _ = render_jinja_template(
        [messages],
        chat_template=tokenizer.get_chat_template(),
        **{**tokenizer.special_tokens_map, **variables},
    )
    end = str(text).rpartition(PROBE)[2]
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    token_ids = tokenizer.encode(end, add_special_tokens=False)
    return next((token_id for token_id in token_ids if token_id in special), None)


SPECIAL_LIKE = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|<(?:start|end)_of_\w+>|\[/?[A-Z_]{4,}\]"
)
"""Texts that are tokens of the model that a template was written for."""


def cut_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Texts in a template that look like special tokens and are several of this tokenizer's."""
    likely = dict.fromkeys(SPECIAL_LIKE.findall(text))
    return [token for token in likely if len(tokenizer.encode(token, add_special_tokens=False)) > 1]
