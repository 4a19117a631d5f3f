"""The included chat templates, judged by what the published ones render."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.prepare.chat_templates import compiled
from penstock.prepare.chat_templates.compiled import compile_template
from penstock.prepare.chat_templates.resolve import TEMPLATES, template_names
from tests.chat_templates.conversations import (
    CHATS,
    Chat,
    assistant,
    fixed_date,
    user,
    without_nulls,
)
from tests.chat_templates.record import FAULTS, GOLDEN, REFUSED, render

ENDS = {
    "gpt-oss": "<|return|>",
    "alpaca": "</s>",
    "command-r": "<|END_OF_TURN_TOKEN|>",
    "deepseek-r1": "<\uff5cend▁of▁sentence\uff5c>",
    "deepseek-v3": "<\uff5cend▁of▁sentence\uff5c>",
    "falcon": "",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "glm4": "",
    "glm4.5": "",
    "granite": "<|end_of_text|>",
    "llama2": " </s>",
    "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>",
    "llama3.2": "<|eot_id|>",
    "mistral-v1": "</s>",
    "mistral-v3": "</s>",
    "mistral-v3-tekken": "</s>",
    "mistral-v7-tekken": "</s>",
    "phi3": "<|end|>",
    "phi3.5": "<|end|>",
    "phi4-mini": "<|end|>",
    "vicuna": "</s>",
    "zephyr": "</s>",
}
"""What ends an answer; `<|im_end|>` where none is named."""

EARLIER_ENDS = {"gpt-oss": "<|end|>"}
"""What ends an answer that others follow, where that is something else."""

BEGUN = {"deepseek-r1": "<think>\n"}
"""Reasoning that a prompt begins and that the published template removes from answers."""


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def recorded(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("name", template_names())
def test_a_template_renders_what_the_published_one_does(name):
    golden = recorded(name)
    assert len(golden["texts"]) >= 30
    for chat_name, expected in golden["texts"].items():
        chat = CHATS[chat_name]
        for form in (chat, replace(chat, messages=without_nulls(chat.messages))):
            if expected == REFUSED:
                with pytest.raises(TemplateError):
                    render(template(name), form, golden["tokens"], prompt=False)
                continue
            text, prompt = expected
            whole = prompt["whole"] if isinstance(prompt, dict) else text + prompt
            found = [
                render(template(name), form, golden["tokens"], prompt=p) for p in (False, True)
            ]
            assert found == [text, whole], (name, chat_name)


@pytest.mark.parametrize("name", template_names())
def test_texts_and_blocks_are_those_that_transformers_renders(name):
    text, tokens = fixed_date(template(name)), recorded(name)["tokens"]
    compiled_template = compile_template(text)
    for chat_name, chat in CHATS.items():
        tools: Any = chat.tools
        # transformers gives reasoning further names, as the renderer does before.
        messages = [
            {**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m
            for m in chat.messages
        ]
        variables = {**tokens, **chat.variables, "tools": tools, "add_generation_prompt": False}
        options: dict[str, Any] = {"chat_template": text, **variables}
        try:
            texts, blocks = render_jinja_template(
                [messages], return_assistant_tokens_mask=True, **options
            )
        except (TemplateError, *FAULTS) as error:
            with pytest.raises(type(error)):
                compiled_template.render_marked(messages, variables)
            continue
        assert compiled_template.render_marked(messages, variables) == (texts[0], blocks[0]), (
            chat_name
        )
        assert compiled_template.render(messages, variables) == texts[0], chat_name


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_a_transformers_without_its_private_compiler_renders_the_same(name, monkeypatch):
    text, tokens = fixed_date(template(name)), recorded(name)["tokens"]
    messages = [user("x"), assistant("y"), user("z"), assistant("w")]
    variables = {**tokens, "tools": None, "add_generation_prompt": False}
    by_private = compile_template(text)
    compile_template.cache_clear()
    public = SimpleNamespace(render_jinja_template=render_jinja_template)
    monkeypatch.setattr(compiled, "chat_template_utils", public)
    by_public = compile_template(text)
    compile_template.cache_clear()
    assert type(by_public) is not type(by_private)
    assert by_public.render(messages, variables) == by_private.render(messages, variables)
    marked = by_public.render_marked(messages, variables)
    assert marked == by_private.render_marked(messages, variables)
    assert len(marked[1]) == 2


def test_a_template_changes_nothing_that_it_sees():
    for change in ("messages.append(1)", "messages[0].update(role='x')", "tools.pop()"):
        with pytest.raises(SecurityError):
            compile_template("{{ " + change + " }}").render([user("x")], {"tools": [{}]})


@pytest.mark.parametrize("name", template_names())
def test_a_template_marks_each_answer_with_its_end(name):
    tokens = recorded(name)["tokens"]
    messages = [user("One?"), assistant("First."), user("Two?"), assistant("Second.")]
    rendered: Any = render_jinja_template(
        [messages],
        chat_template=fixed_date(template(name)),
        return_assistant_tokens_mask=True,
        **tokens,
    )
    [text], [spans] = rendered
    trained = "".join(text[start:end] for start, end in spans)
    end = ENDS.get(name, "<|im_end|>")
    for answer in ("First." + EARLIER_ENDS.get(name, end), "Second." + end):
        before, words, _ = trained.partition(answer)
        assert words, (trained, answer)
        assert "?" not in before
        trained = trained.replace(answer, "")
    # Nothing but the template's own words between the prompt of the last answer and its end.
    asked = render(template(name), Chat(messages[:3]), tokens, prompt=True)
    asked = asked.removesuffix(BEGUN.get(name, ""))
    assert text.startswith(asked)
    assert len(asked) in {start for start, _ in spans}
