"""Chat templates of other tools: names, text, and files."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.config.schema.data import TOKENIZER_TEMPLATE, is_inline_template
from penstock.config.translate.dialect import listed, same_names
from penstock.config.translate.translation import Entry, Rule

TEMPLATE = "data.chat_template"

# `chat_template` of Axolotl.
AXOLOTL: Mapping[str, str] = {
    **same_names("", "alpaca chatml gemma gemma3 granite llama3 qwen3"),
    "cohere": "command-r",
    "deepseek_v3": "deepseek-v3",
    "mistral_v1": "mistral-v1",
    "mistral_v2v3": "mistral-v3",
    "mistral_v3_tekken": "mistral-v3-tekken",
    "mistral_v7_tekken": "mistral-v7-tekken",
    "phi_3": "phi3",
    "phi_35": "phi3.5",
    "qwen_25": "qwen2.5",
}

# `template` of LLaMA-Factory.
LLAMA_FACTORY: Mapping[str, str] = {
    **same_names("", "chatml gemma gemma3 glm4 llama2 llama3 phi4 qwen3 smollm2 vicuna zephyr"),
    "cohere": "command-r",
    "deepseek3": "deepseek-v3",
    "deepseekr1": "deepseek-r1",
    "gemma2": "gemma",
    "glm4_moe": "glm4.5",
    "gpt_oss": "gpt-oss",
    "granite3": "granite",
    "mistral": "mistral-v3",
    "phi": "phi3",
    "phi4_mini": "phi4-mini",
    "qwen": "qwen2.5",
    "qwen3_nothink": "qwen3-instruct",
}

# Templates of LLaMA-Factory with another default system prompt or other blanks, or that treat
# reasoning in another way, than those published with the models.
DIFFERING = frozenset(
    {"smollm2", "zephyr", "qwen3_nothink", "deepseek3", "deepseekr1", "granite3", "vicuna"}
)

TOKENIZERS = ("tokenizer_default", "jinja", "default", "empty")
FALLBACK = "tokenizer_default_fallback_"
FILES = (".jinja", ".jinja2", ".j2")


def chat_template(names: Mapping[str, str]) -> Rule:
    """A rule for a template by one of `names`, as text, or as a file."""

    def rule(entry: Entry) -> None:
        name = str(entry.value)
        if is_inline_template(name) or name.endswith(FILES):
            entry.put(TEMPLATE, name)
        elif name in names:
            entry.put(TEMPLATE, names[name])
            if names is LLAMA_FACTORY and name in DIFFERING:
                entry.approximated(
                    f"{names[name]} is the template published with the model; this one has another "
                    "default system prompt, other blanks, or treats reasoning in another way"
                )
        elif name in TOKENIZERS:
            entry.no_effect(
                "the tokenizer's own template renders conversations, unless one is written"
            )
        elif name.startswith(FALLBACK):
            template = names.get(name.removeprefix(FALLBACK), "another one")
            entry.put(TEMPLATE, TOKENIZER_TEMPLATE)
            entry.explain(f"if the tokenizer has no template, write {TEMPLATE}: {template}")
        else:
            entry.approximated(
                f"the tokenizer's own template is taken for {name}; {TEMPLATE} names another"
            )

    return rule


def template_of_dataset(entry: Entry) -> None:
    """`chat_template` and `chat_template_jinja` of a data set of Axolotl, used if all data sets
    have the same."""
    key = entry.key.rpartition(".")[2]
    sources: list[Any] = listed(entry.get("datasets"))
    values = {str(cast("dict[str, Any]", s).get(key)) for s in sources if isinstance(s, dict)}
    values |= {str(value)} if (value := entry.get(key)) is not None else set()
    if len(values) > 1:
        entry.leave_out(f"all data sets are rendered by {TEMPLATE}; write it")
        return
    into, entry.into = entry.into, ""
    chat_template(AXOLOTL)(entry)
    entry.into = into
