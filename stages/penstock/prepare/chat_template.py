"""Resolves `data.chat_template`: a template of this folder's `templates`, a file, or Jinja."""

import json
from difflib import get_close_matches
from pathlib import Path

from penstock.config.schema.data import TOKENIZER_TEMPLATE, DataConfig, is_inline_template
from penstock.core.errors import ConfigError
from penstock.core.remote.urls import is_url, redact
from penstock.rows.chat_template import ChatTemplate

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
        text, where = value, "data.chat_template"
    else:
        name = FAMILIES.get(value, value)
        path = TEMPLATES / f"{name}{SUFFIX}" if name in template_names() else Path(value)
        text, where = _read(value, path), redact(value)
    # jinja2 takes a tenth of a second to import, and most runs need no template at planning.
    from penstock.rows.template_syntax import template_variables  # noqa: PLC0415

    template_variables(text, where)
    return ChatTemplate(text=text, kwargs=kwargs, where=where)


def _read(value: str, path: Path) -> str:
    if is_url(value):
        raise ConfigError(
            f"data.chat_template is {redact(value)}; only local files are read.\n"
            "  Download it, and write its path."
        )
    try:
        return path.read_text(encoding="utf-8")
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
