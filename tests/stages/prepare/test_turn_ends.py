"""Which token ends a turn, and which of them are trained."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from penstock.core.errors import ConfigError
from penstock.core.sources.pin import pin_tokenizer
from penstock.prepare.chat_templates.resolve import TEMPLATES
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.first_records import ImageSource, first_samples
from penstock.prepare.notices import data_warnings
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.stage import Prepare
from penstock.rows.tokenizer import load_stop_token_ids
from tests.stages.prepare.conversations import said
from tests.stages.prepare.encoding import CHATML, encode, trained, unmarked, words
from tests.stages.prepared import prepare, run, write_lines

CHAT = [
    said("system", "s"),
    said("user", "u"),
    said("assistant", "a"),
    said("tool", "t"),
    said("assistant", "b"),
]
GLM = (
    "{% for m in messages %}{{ '<|header|>' if m.role == 'user' else '<|/header|>' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|/header|>{% endif %}"
)
"""A turn ends where the marker of the next role stands."""


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML)], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("its", "expected"),
    [
        ({"roles_to_train": ["user"]}, "u."),
        ({"roles_to_train": ["tool", "assistant"]}, "a.t.b."),
        ({"roles_to_train": ["system", "user", "assistant", "tool"]}, "s.u.a.t.b."),
        ({"train_on_eos": "all"}, "..a..b."),
        ({"train_on_eos": "last"}, "ab."),
        ({"train_on_eos": "none"}, "ab"),
        ({"mask_eos_in_loss": True}, "ab"),
        ({"train_on_eos": "last", "roles_to_train": ["user", "assistant"]}, "uab."),
        ({"train_on_eos": "all", "roles_to_train": ["tool"]}, "...t.."),
        ({"train_on_eos": "all", "train_on_turns": "last"}, "..a..b."),
    ],
)
def test_roles_and_ends_are_trained_as_is_written(template, its, expected):
    tokenizer = words(template)
    ids, labels = encode({"messages": CHAT}, tokenizer, type="chat", **its)
    assert ids == tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert trained(tokenizer, labels).replace("<|im_end|>", ".") == expected


def test_a_message_of_a_trained_role_is_excluded_by_its_weight():
    messages = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], said("user", "v"), CHAT[4]]
    tokenizer = words(CHATML)
    _, labels = encode({"messages": messages}, tokenizer, type="chat", roles_to_train=["user"])
    assert trained(tokenizer, labels) == "v<|im_end|>"


def test_roles_of_questions_in_columns_are_trained():
    tokenizer = words(CHATML)
    record = {"instruction": "q", "input": "", "output": "a", "system": "s"}
    roles = ["user", "system"]
    _, labels = encode(record, tokenizer, type="alpaca", roles_to_train=roles)
    assert trained(tokenizer, labels) == "s<|im_end|>q<|im_end|>"


def with_tokenizer(path: Any, folder: str) -> Prepare:
    stage = prepare((path, {"type": "chat"}))
    return replace(stage, tokenizer=pin_tokenizer(folder), tokenizer_path=folder)


def stopping(*names: str) -> list[int]:
    return [words().convert_tokens_to_ids(name) for name in names]


def labelled(template: str, messages: Any, stops: list[int]) -> tuple[str, int]:
    """(what is trained, with brackets around it, samples with an answer that has no end)."""
    tokenizer = words(template)
    found = Encoder(DatasetSettings(type="chat"), tokenizer, stop_token_ids=stops)(
        [{"messages": messages}]
    )
    assert found.faults == {}
    ids, labels, _ = found.sides[0][0]
    assert ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    parts = [
        tokenizer.decode([token]) if label == -100 else f"[{tokenizer.decode([token])}]"
        for token, label in zip(ids.tolist(), labels.tolist(), strict=True)
    ]
    return "".join(parts).replace("][", ""), found.counts["without_end"]


def test_the_marker_of_the_next_role_ends_a_turn_where_the_generation_config_names_it():
    messages = [CHAT[1], CHAT[2], said("user", "v"), CHAT[4]]
    without = "<|header|>u<|/header|>[a]<|header|>v<|/header|>[b]"
    assert labelled(GLM, messages, []) == (without, 1)
    with_end = without.replace("[a]<|header|>", "[a<|header|>]")
    assert labelled(GLM, messages, stopping("<|header|>")) == (with_end, 1)
    assert labelled(GLM, messages[:3], stopping("<|header|>"))[1] == 0


@pytest.mark.parametrize("end", ["<|end|>", "<|header|>"])
def test_a_stop_token_behind_the_end_of_a_turn_is_trained_too_unless_that_is_one(end):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>' if add_generation_prompt else '<|header|>' }}"
    )
    messages = [CHAT[1], CHAT[2], said("user", "v"), CHAT[4]]
    begin = (
        "<|im_start|>u<|end|>\n<|im_start|>[a<|end|>]\n<|im_start|>v<|end|>\n<|im_start|>[b<|end|>"
    )
    last = "]\n<|header|>" if end == "<|end|>" else "\n<|header|>]"
    assert labelled(template, messages, stopping(end)) == (begin + last, 0)


@pytest.mark.parametrize("inside", ["", "<|im_end|>", "<|im_end|>\n"])
def test_marks_with_or_without_the_end_and_what_follows_it_train_the_same(inside):
    outside = "<|im_end|>\n".removeprefix(inside)
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% generation %}"
        f"{{{{ m.content + {inside!r} }}}}{{% endgeneration %}}{{{{ {outside!r} }}}}"
        "{% else %}{{ '<|im_start|>' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    messages = [CHAT[1], said("assistant", "a<|im_end|>"), CHAT[1]]
    wanted = (
        "<|im_start|>u<|im_end|>\n<|im_start|>[a<|im_end|><|im_end|>]\n<|im_start|>u<|im_end|>\n"
    )
    assert labelled(template, messages, []) == (wanted, 0)


def test_a_template_without_any_special_token_is_said_at_check_and_at_prepare(tmp_path):
    plain = words(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    record = {"messages": [CHAT[1], CHAT[2], CHAT[1], CHAT[4]]}
    assert labelled(plain.chat_template, record["messages"], []) == (
        "user: u\nassistant:[ a]\nuser: u\nassistant:[ b]\n",
        1,
    )
    [checked] = first_samples([record], DatasetSettings(type="chat"), plain).warnings
    plain.save_pretrained(tmp_path / "plain")
    path = write_lines(tmp_path / "a.jsonl", [record] * 3)
    where = str(tmp_path / "plain")
    _, facts = run(with_tokenizer(path, where), tmp_path / "out")
    [prepared] = data_warnings(facts)
    for warning, counts in ((checked, "1 of 1"), (prepared, "3 of 3")):
        assert f"{counts} records train an answer that no stop token ends" in warning
        assert "data.chat_template: chatml" in warning
    silent = DatasetSettings(type="chat", train_on_eos="none")
    assert first_samples([record], silent, plain).warnings == ()


def test_stop_tokens_are_those_of_the_file_beside_the_tokenizer_which_is_in_its_key(tmp_path):
    folder = tmp_path / "tokenizer"
    words(GLM).save_pretrained(folder)
    before = pin_tokenizer(str(folder)).key
    assert load_stop_token_ids(str(folder)) == ()
    stops = stopping("<|header|>", "<|end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    assert load_stop_token_ids(str(folder)) == tuple(stops)
    assert pin_tokenizer(str(folder)).key != before
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT[1:3] + CHAT[1:2]}])
    _, facts = run(with_tokenizer(path, str(folder)), tmp_path / "out")
    assert facts["without_end"] == 0
    source = ImageSource((str(folder), None), None)
    record = {"messages": CHAT[1:3] + CHAT[1:2]}
    assert (
        first_samples([record], DatasetSettings(type="chat"), words(GLM), None, source).warnings
        == ()
    )
    for ids in ("2", [None], 1.5, {}):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(ConfigError, match="no eos_token_id that can be used"):
            load_stop_token_ids(str(folder))


def test_a_text_that_begins_with_bos_gets_no_second_one():
    tokenizer: Any = type(words())(
        tokenizer_object=Tokenizer.from_str(words().backend_tokenizer.to_str()),
        bos_token="<|end|>",
        eos_token="<|im_end|>",
    )
    [bos] = stopping("<|end|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", bos)]
    )
    texts = [{"text": text} for text in ("<|end|>hi", "hi", "a<|end|>")]
    found = Encoder(DatasetSettings(type="text"), tokenizer)(texts)
    rows = [found.sides[0][i][0].tolist() for i in range(3)]
    assert rows[0] == rows[1] == tokenizer("hi<|im_end|>")["input_ids"]
    assert rows[2] == tokenizer("a<|end|><|im_end|>")["input_ids"]
    assert found.counts["repeated_bos"] == 1
    [note] = first_samples(texts, DatasetSettings(type="text"), tokenizer).warnings
    assert "1 of 3 records begin with the BOS token" in note
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    ids, _ = encode({"messages": CHAT}, tokenizer, type="chat")
    assert ids.count(bos) == 1


@pytest.mark.parametrize("count", [2, 4])
def test_unmarked_gpt_oss_is_refused_with_the_template_that_marks_its_ends(count):
    """The last answer ends with another token than the others, which no rendering tells."""
    marked = (TEMPLATES / "gpt-oss.jinja").read_text()
    library = Tokenizer.from_str(words().backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library)
    names = ("start", "message", "channel", "end", "return", "call")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = marked
    messages = [
        said("user", "u"),
        said("assistant", "a"),
        said("user", "v"),
        said("assistant", "b"),
    ]
    record = {"messages": messages[:count]}
    _, labels = encode(record, tokenizer, type="chat")
    final = "<|channel|>final<|message|>"
    earlier = f"{final}a<|end|>" if count == 4 else ""
    last = "b" if count == 4 else "a"
    assert trained(tokenizer, labels) == f"{earlier}{final}{last}<|return|>"
    tokenizer.chat_template = marked.replace("{%- generation -%}", "").replace(
        "{%- endgeneration -%}", ""
    )
    with pytest.raises(ConfigError, match=r"data\.chat_template: gpt-oss, which renders the same"):
        encode(record, tokenizer, type="chat")
    _, labels = encode(record, tokenizer, type="chat", train_on_eos="none")
    earlier = f"{final}a" if count == 4 else ""
    assert trained(tokenizer, labels) == f"{earlier}{final}{last}"
