"""Names of chat templates in other tools."""

from typing import Any

import pytest

from penstock.config.schema.data import TOKENIZER_TEMPLATE
from penstock.config.translate.apply import translate
from penstock.config.translate.axolotl.rules import AXOLOTL
from penstock.config.translate.dialect import Dialect
from penstock.config.translate.hf.llama_factory import LLAMA_FACTORY
from penstock.config.translate.hf.trl import TRL
from penstock.config.translate.templates import AXOLOTL as AXOLOTL_NAMES
from penstock.config.translate.templates import LLAMA_FACTORY as FACTORY_NAMES
from penstock.config.translate.translation import Translation
from penstock.prepare.chat_templates.resolve import template_names
from tests.config.dialects.test_hf_dialects import BASES, GPUS

JINJA = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHATS = {"path": "d", "type": "chat_template"}


def translated(dialect: Dialect, **keys: Any) -> Translation:
    return translate({**BASES[dialect.name], **keys}, dialect, GPUS)


def test_every_name_is_a_template_of_ours() -> None:
    assert {*AXOLOTL_NAMES.values(), *FACTORY_NAMES.values()} <= set(template_names())


@pytest.mark.parametrize(
    ("dialect", "keys", "ours"),
    [
        (AXOLOTL, {"chat_template": "qwen_25"}, "qwen2.5"),
        (AXOLOTL, {"chat_template": "jinja", "chat_template_jinja": JINJA}, JINJA),
        (AXOLOTL, {"chat_template_jinja": "a/b.jinja"}, "a/b.jinja"),
        (AXOLOTL, {"chat_template": "tokenizer_default"}, None),
        (AXOLOTL, {"chat_template": "tokenizer_default_fallback_chatml"}, TOKENIZER_TEMPLATE),
        (AXOLOTL, {"chat_template": "metharme"}, None),
        (AXOLOTL, {"datasets": [{**CHATS, "chat_template": "phi_35"}] * 2}, "phi3.5"),
        (
            AXOLOTL,
            {"datasets": [{**CHATS, "chat_template": n} for n in ("gemma", "chatml")]},
            None,
        ),
        (
            AXOLOTL,
            {"chat_template": "llama3", "datasets": [{**CHATS, "chat_template": "chatml"}]},
            "llama3",
        ),
        (LLAMA_FACTORY, {"template": "llama3"}, "llama3"),
        (LLAMA_FACTORY, {"template": "yuan"}, None),
        (TRL, {"chat_template_path": "x/chat_template.jinja"}, "x/chat_template.jinja"),
        (TRL, {"chat_template_path": "org/model"}, None),
    ],
)
def test_a_template_is_named_as_ours_or_its_absence_is_said(
    dialect: Dialect, keys: dict[str, Any], ours: str | None
) -> None:
    found = translated(dialect, **keys)
    assert found.settings["data"].get("chat_template") == ours
    lines = [line for line in found.lines if "template" in line.key]
    assert all(line.names or line.why for line in lines)


def test_templates_of_data_sets_that_differ_are_reported() -> None:
    differing = [{**CHATS, "chat_template": name} for name in ("gemma", "chatml")]
    lines = translated(AXOLOTL, datasets=differing).lines
    kinds = {line.key: line.kind for line in lines if line.key.endswith("chat_template")}
    assert list(kinds.values()) == ["left out"] * 2
