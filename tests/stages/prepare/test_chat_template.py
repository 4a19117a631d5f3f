"""`data.chat_template` and its variables, from the config to what is trained and exported."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.config.loading.load import loads
from penstock.core.errors import ConfigError
from penstock.core.sources.pin import pin_tokenizer
from penstock.engine.hf.tokenizer_files import TokenizerFiles
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.chat_templates.resolve import (
    TEMPLATES,
    describe_template,
    resolve_chat_template,
    template_names,
)
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.settings import DatasetSettings
from penstock.rows.chat_template import ChatTemplate
from penstock.rows.template_syntax import template_variables
from penstock.rows.tokenizer import byte_tokenizer
from penstock.train.eval.sample_prompts import SamplePrompts
from tests.config.values import smallest
from tests.stages.prepare.encoding import words

PLAIN = (
    "{% for m in messages %}{{ m.role + '/' + (effort | default('medium')) + ': ' }}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant/' + (effort | default('medium')) }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROWS = {
    "chat": {"messages": MESSAGES},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "instruction": {"instruction": "q", "output": "a"},
    "alpaca": {"instruction": "q", "output": "a"},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "kto": {"prompt": "q", "completion": "a", "label": True},
}


def resolved(**data) -> ChatTemplate | None:
    settings = {"datasets": [{"path": "x"}], **data}
    return resolve_chat_template(loads(smallest(data=settings)).data)


def rendered(record, template=None, kind: Any = "chat", tokenizer=None) -> str:
    """The text of the record's first sample. Raises its fault."""
    tokenizer = tokenizer or words("other template")
    found = Encoder(DatasetSettings(type=kind, chat_template=template), tokenizer)([record])
    for fault in found.faults.values():
        raise fault
    return tokenizer.decode(found.sides[0][0][0])


def by_transformers(template: str, **variables) -> str:
    return words(template).apply_chat_template(MESSAGES, tokenize=False, **variables)


def test_a_template_is_a_name_a_path_or_text_and_renders_as_transformers(tmp_path):
    (tmp_path / "mine.jinja").write_text(PLAIN)
    for value in (str(tmp_path / "mine.jinja"), PLAIN):
        found = resolved(chat_template=value)
        assert rendered(ROWS["chat"], found) == by_transformers(PLAIN)
    named = (TEMPLATES / "chatml.jinja").read_text()
    assert rendered(ROWS["chat"], resolved(chat_template="chatml")) == by_transformers(named)
    assert resolved() is None
    assert resolved(chat_template="tokenizer") is None


def test_variables_come_from_the_record_then_from_the_config():
    for value in ("tokenizer", PLAIN):
        found = resolved(chat_template=value, chat_template_kwargs={"effort": "low"})
        tokenizer = words(PLAIN if value == "tokenizer" else "other")
        assert rendered(ROWS["chat"], found, tokenizer=tokenizer) == by_transformers(
            PLAIN, effort="low"
        )
    for kind, record in ROWS.items():
        for own in ({"effort": "high", "absent": None}, '{"effort": "high"}'):
            text = rendered({**record, "chat_template_kwargs": own}, found, kind)
            assert text == by_transformers(PLAIN, effort="high"), kind
        assert rendered(record, found, kind) == by_transformers(PLAIN, effort="low")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"messages": []}, "which comes from the conversation"),
        ({"a-b": 1}, "no name that a template can read"),
        ({"none": 1}, "no name that a template can read"),
        ("{", "not JSON"),
        ([1], "where an object is meant"),
    ],
)
def test_variables_that_cannot_be_given_make_a_bad_record(value, why):
    with pytest.raises(BadRecord, match=why):
        rendered({**ROWS["chat"], "chat_template_kwargs": value}, resolved(chat_template=PLAIN))


def test_variables_that_the_template_does_not_read_are_told_once(caplog):
    found = resolved(chat_template=PLAIN, chat_template_kwargs={"enable_thinking": False})
    encoder = Encoder(DatasetSettings(type="chat", chat_template=found), words())
    encoder([{**ROWS["chat"], "chat_template_kwargs": {"efort": "low"}}] * 3)
    assert [record.getMessage() for record in caplog.records] == [
        "data.chat_template_kwargs sets enable_thinking, which the chat template does not read.",
        "column chat_template_kwargs sets efort, which the chat template does not read.",
    ]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"chat_template": "chatlm"}, "did you mean 'chatml'?"),
        ({"chat_template": "nothing-like-it"}, "or one of: .*chatml"),
        ({"chat_template": "no/such.jinja"}, "there is no file no/such.jinja"),
        ({"chat_template": "s3://bucket/x.jinja"}, "only local files are read"),
        ({"chat_template": "/"}, "cannot be read"),
        ({"chat_template": "a\n{% if %}"}, r"data.chat_template, line 2: Expected an expression"),
        ({"chat_template": " "}, "is empty"),
        ({"chat_template": "training"}, "data.turn_rendering: per_turn"),
        ({"chat_template": "published"}, "data.turn_rendering: whole"),
        ({"chat_template_kwargs": {"tools": []}}, "which comes from the conversation"),
        ({"chat_template_kwargs": {"a b": 1}}, "no name that a template can read"),
    ],
)
def test_what_is_no_template_is_refused_with_what_to_write(data, says):
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        resolved(**data)


def test_a_syntax_error_names_the_file_and_the_line(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(
        "{{ 'a' }}\n{% for m in messages %}\n{{ m.content | no_such_filter }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=rf"{path}, line 3: No filter named 'no_such_filter'"):
        resolved(chat_template=str(path))
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer/chat_template.jinja").write_text("{{ 'a' }}\n{% endif %}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"tokenizer/chat_template\.jinja, line 2: .*endif"):
        Encoder(DatasetSettings(type="chat"), tokenizer)


VALUES = {
    "effort": 'a "quoted" \\ {% text %} \N{GRINNING FACE} é',
    "flag": False,
    "one": 1,
    "zero": 0.0,
    "nothing": None,
    "nested": {"a": [True, None, "x"], "b": {}},
}
SHOWN = (
    "{% for m in messages %}{{ [effort, flag, one, zero, nothing, nested] | tojson }}{% endfor %}"
)


@pytest.mark.parametrize("value", [SHOWN, "tokenizer"])
def test_the_exported_tokenizer_renders_as_the_training_data(value, tmp_path):
    source = tmp_path / "source"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SHOWN if value == "tokenizer" else "another"
    tokenizer.save_pretrained(source, save_jinja_files=False)
    template = resolved(chat_template=value, chat_template_kwargs=VALUES)
    files = TokenizerFiles(str(source), pin_tokenizer(str(source)), template)
    files.write(tmp_path / "hf")
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = exported.apply_chat_template(MESSAGES[:1], tokenize=False)
    assert json.loads(text) == list(VALUES.values())
    assert json.loads(exported.apply_chat_template(MESSAGES[:1], tokenize=False, one=2))[2] == 2
    assert "chat_template" not in json.loads((tmp_path / "hf/tokenizer_config.json").read_text())


def test_without_variables_the_exported_template_is_the_text_itself(tmp_path):
    template = resolved(chat_template="chatml")
    TokenizerFiles("builtin:bytes", pin_tokenizer("builtin:bytes"), template).write(tmp_path)
    text = (TEMPLATES / "chatml.jinja").read_text()
    assert (tmp_path / "chat_template.jinja").read_text() == text


def test_generation_stops_where_the_chosen_template_ends_an_answer():
    tokenizer = byte_tokenizer()
    ends = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")}
    files = TokenizerFiles(
        "builtin:bytes", pin_tokenizer("builtin:bytes"), resolved(chat_template="chatml")
    )
    other = ends["<|endoftext|>"]
    expected = [ends["<|im_end|>"], other]
    assert files.with_end_of_turn({"eos_token_id": other})["eos_token_id"] == expected
    assert files.with_end_of_turn({"eos_token_id": expected})["eos_token_id"] == expected
    assert files.with_end_of_turn({})["eos_token_id"] == ends["<|im_end|>"]
    own = TokenizerFiles("builtin:bytes", pin_tokenizer("builtin:bytes"))
    assert own.with_end_of_turn({"eos_token_id": other}) == {"eos_token_id": other}


def test_sample_prompts_are_rendered_and_end_as_the_training_data():
    template = resolved(
        chat_template=PLAIN.replace("eos_token", "'<|endoftext|>'"),
        chat_template_kwargs={"effort": "low"},
    )
    prompts = SamplePrompts.encode(["q"], "builtin:bytes", None, template)
    tokenizer: Any = byte_tokenizer()
    assert tokenizer.decode(prompts.token_ids[0]).endswith("assistant/low")
    ends = ["<|im_end|>", "<|endoftext|>"]
    assert prompts.stop_tokens == tuple(tokenizer.convert_tokens_to_ids(ends))


@pytest.mark.parametrize("name", template_names())
def test_every_included_template_marks_what_is_trained(name):
    text = (TEMPLATES / f"{name}.jinja").read_text()
    assert "messages" in template_variables(text, name)
    assert "{%- generation" in text


def test_check_says_how_a_template_fits_the_tokenizer():
    tokenizer = byte_tokenizer()
    fitting = resolved(chat_template="chatml", chat_template_kwargs={"effort": "low"})
    assert fitting
    assert describe_template(fitting, tokenizer) == (
        "chatml; an answer ends with <|im_end|>; warning: it does not read chat_template_kwargs: "
        "effort"
    )
    other = resolved(chat_template="llama3")
    assert other
    text = describe_template(other, tokenizer)
    assert text.startswith("llama3; no special token ends an answer; warning: <|start_header_id|>")
    assert "<|eot_id|> are no tokens of this tokenizer" in text


def test_a_template_is_in_keys_by_its_text(tmp_path):
    path, other = tmp_path / "a.jinja", tmp_path / "b.jinja"
    path.write_text(PLAIN)
    other.write_text(PLAIN)
    values = (PLAIN, str(path), str(other))
    settings = [DatasetSettings(chat_template=resolved(chat_template=v)) for v in values]
    first, *others = [item.model_dump(mode="json") for item in settings]
    assert others == [first] * 2
    path.write_text(PLAIN + " ")
    changed = DatasetSettings(chat_template=resolved(chat_template=str(path)))
    assert changed.model_dump(mode="json") != first
    assert "chat_template" not in DatasetSettings(chat_template=resolved()).model_dump()
