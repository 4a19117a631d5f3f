"""Resolves `data.chat_template`: a template of this folder's `templates`, a file, or Jinja."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.schema.data import TOKENIZER_TEMPLATE, DataConfig, is_inline_template
from penstock.core.errors import ConfigError
from penstock.core.files import require_regular
from penstock.core.remote.urls import is_url, redact
from penstock.rows.chat_template import ChatTemplate
from penstock.rows.probe import MAX_TEMPLATE, require_bounded_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".jinja"


FAMILIES = {
    "qwen": "qwen2.5",
    "gemma2": "gemma",
    "mistral": "mistral-v3",
    "phi": "phi4",
    "glm": "glm4.5",
    "deepseek": "deepseek-v3",
    "cohere": "command-r",
}
"""Names of model families, and the template that is meant."""


def template_names() -> list[str]:
    """The names of the included templates."""
    return sorted(path.stem for path in TEMPLATES.glob(f"*{SUFFIX}"))


def resolve_chat_template(data: DataConfig) -> ChatTemplate | None:
    """What a run's conversations are rendered with; None for the tokenizer's own template alone.

    Raises ConfigError for an unknown name, a file that cannot be read, and text that is no Jinja.
    """
    kwargs = json.dumps(data.chat_template_kwargs, sort_keys=True)
    value = data.chat_template
    if value == TOKENIZER_TEMPLATE:
        return ChatTemplate(kwargs=kwargs) if data.chat_template_kwargs else None
    if is_inline_template(value):
        text, field, is_included = value, "data.chat_template", False
    else:
        name = FAMILIES.get(value, value)
        path = TEMPLATES / f"{name}{SUFFIX}" if name in template_names() else Path(value)
        text, field = _read(value, path), redact(value)
        is_included = path.parent == TEMPLATES
    # jinja2 takes a tenth of a second to import, and most runs need no template at planning.
    from penstock.rows.template_syntax import template_variables  # noqa: PLC0415

    if not is_included:
        require_bounded_template(text, field)
    # For its error, while the run is planned: what is read matters once there is data.
    template_variables(text, field)
    return ChatTemplate(text=text, kwargs=kwargs, where=field)


def describe_template(template: ChatTemplate, tokenizer: "PreTrainedTokenizerBase") -> str:
    """What a template means with this tokenizer, in one line with warnings. Raises ConfigError if
    the tokenizer's own template is no Jinja."""
    from penstock.rows import template_syntax, template_tokens  # noqa: PLC0415

    changed, variables = template.apply(tokenizer), template.variables
    text = changed.get_chat_template() if changed.chat_template else ""
    read = template_syntax.template_variables(text, template_tokens.locate_template(tokenizer))
    end = template_tokens.end_of_turn(changed, variables) if text else None
    parts = [
        template.where or "the tokenizer's own",
        "no special token ends an answer"
        if end is None
        else f"an answer ends with {tokenizer.convert_ids_to_tokens(end)}",
    ]
    if unread := sorted(variables.keys() - read):
        parts.append(f"warning: it does not read chat_template_kwargs: {', '.join(unread)}")
    if cut := template_tokens.cut_tokens(changed, variables) if text else []:
        parts.append(
            f"warning: {', '.join(cut)} are no tokens of this tokenizer, and become several "
            "ordinary tokens each"
        )
    return "; ".join(parts)


def _read(value: str, path: Path) -> str:
    if is_url(value):
        raise ConfigError(
            f"data.chat_template is {redact(value)}; only local files are read.\n"
            "  Download it, and write its path."
        )
    try:
        require_regular(path)
        with path.open(encoding="utf-8") as file:
            # One character more than allowed is enough to refuse a file of any size.
            return file.read(MAX_TEMPLATE + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise _unknown(value) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: {redact(value)} cannot be read: {error}") from error


def _unknown(value: str) -> ConfigError:
    if "/" in value or value.endswith(SUFFIX):
        return ConfigError(
            f"data.chat_template: there is no file {redact(value)}.\n"
            f"  Paths are relative to {Path.cwd()}."
        )
    names = sorted([*template_names(), *FAMILIES])
    near = get_close_matches(value.lower(), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigError(
        f"data.chat_template is {value!r}, which is no template of Penstock's{hint}\n"
        f"  Write {TOKENIZER_TEMPLATE}, a path to a .jinja file, or one of: {', '.join(names)}."
    )
