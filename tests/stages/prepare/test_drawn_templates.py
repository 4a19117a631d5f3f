"""Drawn templates and conversations: what the assistant says is trained, and what ends its turn.

The oracle writes a conversation piece by piece, as the template does, and so knows where its words
are. Ids and places of tokens are those of transformers.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.settings import DatasetSettings
from tests.stages.prepare.encoding import words

SPECIAL = ("<|user|>", "<|us|>", "<|use|>", "<|bot|>", "<|sys|>", "<|tool|>", "<|end|>", "<|eos|>")
KINDS = ("bytes", "nfc", "greedy", "pieces", "no prefix", "legacy", "wordpiece")
CONTENTS = (
    "a",
    "Hello!",
    " b ",
    "\n4",
    "x\n",
    "é日 don't",
    "2+2?",
    "",
    "no<|end|>",
    "<|user|>y",
    "\n\n",
)


@cache
def tokenizer_of(kind: str) -> Any:
    """Tokenizers as of Qwen (`bytes`, `nfc`, `greedy`), Mistral (`pieces`), Gemma (`no prefix`),
    Llama 2 (`legacy`) and BERT (`wordpiece`)."""
    learnt = "pieces" if kind in ("no prefix", "legacy") else kind
    if kind == "wordpiece":
        marks = [*"<|>?!+'.:", *"abdehlnostuxy", "日", "4", "2", "hello", "user", "bot"]
        names = ["[UNK]", *marks, *(f"##{mark}" for mark in marks)]
        vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        tokenizer = Tokenizer.from_str(words(None, learnt).backend_tokenizer.to_str())
    if kind == "no prefix":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    if kind == "legacy":
        tokenizer.pre_tokenizer = None
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, rstrip=kind == "greedy") for name in SPECIAL]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@dataclass
class Drawn:
    """A template. Texts are what it writes around the words of a message."""

    begin: str
    before_user: str
    heads: dict[str, str]
    gap: str
    end: str
    after: str
    ends_others: bool
    final: str
    trims: bool
    reasoning: str
    calls: tuple[str, str]
    marks: str
    stops: tuple[str, ...]

    def jinja(self) -> str:
        """As a chat template."""
        mark, unmark = ("{% generation %}", "{% endgeneration %}") if self.marks else ("", "")
        closing = [self.gap + self.end, self.after]
        call, called = self.calls
        inside = {"": 0, "words": 0, "end": 1, "after": 2}[self.marks]
        trim = " | trim" if self.trims else ""
        condition = {"kept": "", "last": " and loop.last"}.get(self.reasoning, " and false")
        return (
            f"{{% set heads = {self.heads!r} %}}{{{{ {self.begin!r} }}}}"
            "{% for m in messages %}"
            f"{{% if m.role == 'user' %}}{{{{ {self.before_user!r} }}}}{{% endif %}}"
            "{{ heads[m.role] }}{% if m.role == 'assistant' %}"
            f"{mark}"
            f"{{% if m.reasoning_content{condition} %}}"
            "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
            f"{{{{ (m.content or ''){trim} }}}}"
            f"{{% for call in m.tool_calls or [] %}}{{{{ {call!r} + call.function.name }}}}"
            f"{{{{ {called!r} }}}}{{% endfor %}}"
            f"{{{{ {''.join(closing[:inside])!r} }}}}{unmark}"
            f"{{{{ {''.join(closing[inside:])!r} }}}}"
            f"{{% else %}}{{{{ m.content{trim} }}}}"
            f"{{{{ {(''.join(closing) if self.ends_others else self.after)!r} }}}}"
            "{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ heads['assistant'] }}"
            f"{{% else %}}{{{{ {self.final!r} }}}}{{% endif %}}"
        )


def draw_template(draw: random.Random) -> Drawn:
    end = draw.choice(["<|end|>", "<|end|>", "<|eos|>", ""])
    final = draw.choice(["", "", "<|eos|>"] if end != "<|eos|>" else [""])
    is_plain = not end and draw.random() < 0.3
    names = {"user": "<|user|>", "assistant": draw.choice(["<|bot|>", "<|us|>", "<|use|>"])}
    names |= {"system": "<|sys|>", "tool": "<|tool|>"}
    if is_plain:
        names = {"user": "User:", "assistant": "Use bot:", "system": "Sys:", "tool": "Tool:"}
    blank = draw.choice(["", "\n", " "])
    return Drawn(
        begin=draw.choice(["", "<|sys|>"]),
        before_user=draw.choice(["", "", "<|us|>"]) if not is_plain else "",
        heads={role: name + blank for role, name in names.items()},
        gap=draw.choice(["", "", " "]) if end else "",
        end=end,
        after=draw.choice(["", "\n"]),
        ends_others=draw.random() < 0.5,
        final=final,
        trims=draw.random() < 0.4,
        reasoning=draw.choice(["none", "kept", "last"]),
        calls=draw.choice([("<call>", "</call>"), ("<|tool|>", "<|us|>")]),
        marks=draw.choice(["", "", "words", "end", "after"]),
        stops=draw.choice([("<|eos|>",), ("<|eos|>", "<|user|>"), ("<|end|>",), ("<|use|>",)]),
    )


def draw_messages(draw: random.Random, template: Drawn) -> list[dict[str, Any]]:
    roles = ["system"] * (draw.random() < 0.3)
    for _ in range(draw.randint(1, 3)):
        roles += ["user", "assistant"]
        roles += ["tool", "assistant"] * (draw.random() < 0.2)
    roles = roles[: len(roles) - (draw.random() < 0.15)]
    messages: list[dict[str, Any]] = []
    for role in roles:
        message: dict[str, Any] = {"role": role, "content": draw.choice(CONTENTS)}
        if role == "assistant":
            if template.reasoning != "none" and draw.random() < 0.5:
                message["reasoning_content"] = draw.choice(["Hm", "so\n"])
            if draw.random() < 0.2:
                function = {"name": draw.choice(["f", "g"]), "arguments": {}}
                message["tool_calls"] = [{"type": "function", "function": function}]
            if draw.random() < 0.2:
                message["weight"] = 0
        messages.append(message)
    return messages


def draw_details(draw: random.Random, messages: list[dict[str, Any]], roles: list[str]) -> None:
    """Give messages of trained roles lists of ranges of their characters."""
    for message in messages:
        content = message["content"]
        is_excluded = message["role"] not in roles or message.get("weight") == 0
        if is_excluded or not content.strip() or draw.random() < 0.3:
            continue
        places = sorted(draw.sample(range(len(content) + 1), draw.randint(0, len(content))))
        message["detail"] = [
            {"begin_offset": a, "end_offset": b - 1, "train": draw.random() < 0.5}
            for a, b in pairwise(places)
            if draw.random() < 0.8
        ]


def pieces_of(
    template: Drawn, messages: list[dict[str, Any]], *, is_per_turn: bool
) -> Iterator[tuple[str, int | None]]:
    """(text, index of the message whose words it is) of all that the template writes."""
    yield template.begin, None
    for index, message in enumerate(messages):
        role = message["role"]
        yield (template.before_user if role == "user" else "") + template.heads[role], None
        content = message["content"].strip() if template.trims else message["content"]
        if role == "assistant":
            is_shown = template.reasoning == "kept" or is_per_turn or index == len(messages) - 1
            reasoning = message.get("reasoning_content")
            shown = f"<think>{reasoning}</think>" if reasoning and is_shown else ""
            begin, end = template.calls
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
            content = shown + content + "".join(begin + name + end for name in calls)
        yield content, index
        is_closed = role == "assistant" or template.ends_others
        yield template.gap + template.end if is_closed else "", None
        yield template.after, None
    yield template.final, None


def next_special(text: str) -> tuple[str, int]:
    """(the special token after blanks at the beginning of a text, its end); empty without one."""
    rest = text.lstrip()
    name = next((name for name in sorted(SPECIAL, key=len)[::-1] if rest.startswith(name)), "")
    return name, len(text) - len(rest) + len(name)


def end_of(template: Drawn, text: str, place: int, *, is_answer: bool, is_last: bool) -> Any:
    """[start, stop) of what ends the turn whose words end at `place`."""
    token, stop = next_special(text[place:])
    closes = template.end or template.final
    is_end = token and (token in template.stops or (token == closes and (template.end or is_last)))
    if not is_answer:
        is_end = token and (
            (template.ends_others and template.end and token == template.end)
            or (is_last and token == template.final and token in (closes, *template.stops))
        )
    if not is_end:
        return None
    start = place + stop - len(token)
    if is_answer and token not in template.stops:
        another, length = next_special(text[place + stop :])
        stop += length if another in template.stops else 0
    return start, place + stop


def reasoning_length(message: dict[str, Any], words: str) -> int:
    """Characters before the content in the words of a message."""
    shown = f"<think>{message.get('reasoning_content')}</think>"
    return len(shown) if message["role"] == "assistant" and words.startswith(shown) else 0


def details_of(template: Drawn, message: dict[str, Any], place: int) -> Iterator[tuple[int, int]]:
    """The trained ranges of a message whose content, as the template shows it, is at `place`."""
    content = message["content"]
    first, last = 0, len(content)
    if template.trims:
        first, last = len(content) - len(content.lstrip()), len(content.rstrip())
    for entry in message["detail"]:
        start, stop = max(entry["begin_offset"], first), min(entry["end_offset"] + 1, last)
        if entry["train"] and start < stop:
            yield place + start - first, place + stop - first


def expected(
    template: Drawn, messages: list[dict[str, Any]], settings: DatasetSettings
) -> tuple[str, list[tuple[int, int]]]:
    """(whole text, trained parts of it)."""
    roles, ends = settings.roles_to_train, settings.trained_ends
    trained = [
        m["role"] in roles and m.get("weight") != 0 and m.get("detail") != [] for m in messages
    ]
    wanted = [
        i
        for i, m in enumerate(messages)
        if m["role"] == "assistant" and (trained[i] or ends == "all")
    ]
    is_changed = template.reasoning == "last" and any(
        "reasoning_content" in messages[i] and i < len(messages) - 1 for i in wanted
    )
    text, places, contents = "", dict[int, tuple[int, int]](), dict[int, int]()
    for piece, index in pieces_of(
        template, messages, is_per_turn=is_changed and not template.marks
    ):
        if index is not None:
            places[index] = len(text), len(text) + len(piece)
            contents[index] = len(text) + reasoning_length(messages[index], piece)
        text += piece
    # A message without words is no turn, except the assistant's, which ends.
    is_turn = [m["role"] == "assistant" or m["content"].strip() for m in messages]
    last = max((i for i in places if trained[i] and is_turn[i]), default=-1)
    parts: list[tuple[int, int]] = []
    for index, (start, stop) in places.items():
        is_answer = messages[index]["role"] == "assistant"
        if not is_answer and not messages[index]["content"].strip():
            continue
        end = end_of(template, text, stop, is_answer=is_answer, is_last=index == len(messages) - 1)
        has_end = ends == "all" or (
            trained[index] and (ends == "turn" or (ends == "last" and index == last))
        )
        detail = messages[index].get("detail")
        if detail is None:
            parts += [(start, stop)] * trained[index]
        elif trained[index]:
            parts += details_of(template, messages[index], contents[index])
        if end and has_end:
            is_whole = is_answer and trained[index] and detail is None
            parts.append((stop if is_whole else end[0], end[1]))
    return text, [part for part in parts if part[0] < part[1]]


def check(seed: int, tokenizer: Any = None, *, is_detailed: bool = False) -> None:
    """Compare one drawn template, with a tokenizer of a drawn kind unless one is given."""
    draw = random.Random(seed)
    template = draw_template(draw)
    messages = draw_messages(draw, template)
    options: dict[str, Any] = {
        "roles_to_train": draw.choice([["assistant"]] * 4 + [["user", "assistant"]]),
        "train_on_eos": draw.choice(["turn"] * 4 + ["all", "last", "none"]),
    }
    if is_detailed:
        draw_details(random.Random(seed), messages, options["roles_to_train"])
        options["field_message_training_detail"] = "detail"
    settings = DatasetSettings(type="chat", **options)
    tokenizer = tokenizer or tokenizer_of(draw.choice(KINDS))
    tokenizer.chat_template = template.jinja()
    eos, *stops = template.stops
    tokenizer.eos_token = eos
    text, parts = expected(template, messages, settings)
    judge = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if any(max(start, a) < min(stop, b) for a, b in parts) else -100
        for token, (start, stop) in zip(judge["input_ids"], judge["offset_mapping"], strict=True)
    ]
    encode = Encoder(settings, tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(stops))
    found = encode([{"messages": messages}])
    if set(labels[1:]) <= {-100}:
        assert found.faults[0].reason == "no_trained_tokens"
        return
    assert found.faults == {}, (found.faults, template, messages)
    ids, mine, _ = found.sides[0][0]
    assert ids.tolist() == judge["input_ids"], (text, template, messages)
    wrong = [
        (tokenizer.convert_ids_to_tokens(int(token)), int(a != -100), int(b != -100))
        for token, a, b in zip(ids, labels, mine.tolist(), strict=True)
    ]
    assert mine.tolist() == labels, (text, wrong, template, messages, settings.train_on_eos)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 160, 20))
def test_tokens_are_of_the_whole_text_and_those_of_the_words_and_ends_are_trained(start):
    for seed in range(start, start + 20):
        check(seed)


@pytest.mark.parametrize("start", range(0, 160, 20))
def test_tokens_of_the_trained_characters_and_of_the_end_are_trained(start):
    for seed in range(start, start + 20):
        check(seed, is_detailed=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(5000, 7500, 100))
def test_thousands_of_ranges(start):
    for seed in range(start, start + 100):
        check(seed, is_detailed=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(1000, 3500, 100))
def test_thousands_of_templates(start):
    for seed in range(start, start + 100):
        check(seed)
