"""YAML is read as version 1.2 means it, with the place of everything."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from penstock.config.loading.yaml12 import YamlError, dump, parse

EXAMPLES = Path(__file__).parents[3] / "shared" / "examples"

# Section 10.3.2 of the YAML 1.2.2 specification, and what version 1.1 reads otherwise.
TABLE: list[tuple[str, Any]] = [
    ("1e-5", 1e-5),
    ("1E+3", 1000.0),
    ("2e5", 2e5),
    ("-.5", -0.5),
    ("6.", 6.0),
    ("+12", 12),
    ("012", 12),
    ("0o17", 15),
    ("0xFf", 255),
    ("1_000", "1_000"),
    ("1:30", "1:30"),
    ("0b11", "0b11"),
    ("2024-01-01", "2024-01-01"),
    ("no", "no"),
    ("off", "off"),
    ("on", "on"),
    ("Yes", "Yes"),
    ("y", "y"),
    ("true", True),
    ("FALSE", False),
    ("tRUE", "tRUE"),
    ("null", None),
    ("~", None),
    ("", None),
    ("nil", "nil"),
    ("'1'", "1"),
    ('"null"', "null"),
    ("!!str 1", "1"),
    ("!!float 1", 1.0),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("1.2.3", "1.2.3"),
    ("e5", "e5"),
    (".", "."),
    ("[1, a, {b: c}]", [1, "a", {"b": "c"}]),
]


@pytest.mark.parametrize(("text", "value"), TABLE, ids=[repr(text) for text, _ in TABLE])
def test_scalar_follows_the_core_schema(text: str, value: Any) -> None:
    found = parse(f"key: {text}").value["key"]
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse(".nan").value)


def test_mapping_may_be_merged_into_others() -> None:
    text = """\
base: &base {a: 1, b: 2}
more: &more {b: 3, c: 4}
one: {<<: *base, b: 9}
two:
  <<: [*base, *more]
three: &deep {<<: *base, d: 5}
four: {<<: *deep}
quoted: {"<<": 1}
"""
    value = parse(text).value
    assert value["one"] == {"a": 1, "b": 9}
    assert value["two"] == {"a": 1, "b": 2, "c": 4}
    assert value["four"] == {"a": 1, "b": 2, "d": 5}
    assert value["quoted"] == {"<<": 1}


def test_every_value_remembers_its_line_and_column() -> None:
    document = parse("# comment\na:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n")
    places = document.positions
    assert places["a", "b"].key == (3, 3)
    assert places["a", "b"].value == (3, 6)
    assert places["a", "c", 0].value == (5, 7)
    assert places["a", "c", 1].line == 6
    assert places["a", "c", 1, "d"].value == (6, 11)


def test_key_written_twice_is_a_fault_and_the_first_value_stays() -> None:
    document = parse("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert document.value == {"a": {"b": 1, "c": 2}}
    assert [(fault.path, fault.text) for fault in document.faults] == [
        (("a", "b"), "written twice, first in line 2; keep one of them")
    ]
    assert document.positions["a", "b"].line == 4


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\n\tb: 2\n", 2, "tab"),
        ("a: [1,\nb: 2\n", 3, "line 1"),
        ("a: b: c\n", 1, "not allowed here"),
        ("a: 1\n--- \nb: 2\n", 2, "another document"),
        ("a: *unknown\n", 1, "unknown"),
        ("a: &a [*a]\n", 1, "a value that contains it"),
        ("a: &a\n  <<: *a\n", 2, "a value that contains it"),
        ("a: 1\nb: \x07\n", 2, "U+0007"),
        ("[" * 2000, 1, "deeply"),
        ("a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 400)), 1, "deeply"),
    ],
)
def test_text_that_is_no_yaml_is_told_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(YamlError, match=words.replace("+", r"\+")) as error:
        parse(text)
    assert error.value.line == line


@pytest.mark.parametrize("merge", ["", "{<<: "], ids=["lists", "merge keys"])
def test_aliases_do_not_expand_without_end(merge: str) -> None:
    lines = ["a0: &a0 {x: 1}"]
    for n in range(1, 12):
        aliases = f"[{', '.join([f'*a{n - 1}'] * 10)}]"
        lines.append(f"a{n}: &a{n} {merge}{aliases}{'}' if merge else ''}")
    with pytest.raises(YamlError, match="expands to more than"):
        parse("\n".join(lines))


@pytest.mark.parametrize("text", ["!!python/object:os.system x", "!custom {a: 1}", "!!set {a}"])
def test_tags_outside_of_the_core_schema_are_refused(text: str) -> None:
    document = parse(f"key: {text}")
    assert len(document.faults) == 1
    assert "is not supported" in document.faults[0].text


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="needs ../shared/examples")
def test_real_files_read_as_another_yaml_1_2_reader_reads_them() -> None:
    files = sorted(EXAMPLES.rglob("*.yaml"))
    assert len(files) > 10
    for file in files:
        assert parse(file.read_text()).value == YAML(typ="safe", pure=True).load(file), file.name


plain = st.from_regex(r"[-+0-9.eExo_naifNALt~]{1,7}", fullmatch=True)


@given(plain)
def test_any_plain_word_is_a_number_only_where_python_agrees(text: str) -> None:
    try:
        value = parse(f"[{text}]").value[0]
    except YamlError:
        return
    if isinstance(value, float) and math.isfinite(value):
        assert value == float(text)
    elif isinstance(value, int) and not isinstance(value, bool):
        assert value == int(text, 0 if "x" in text or "o" in text else 10)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
SCALARS = LEAVES | st.sampled_from([text for text, _ in TABLE])


def test_text_of_several_lines_is_written_as_a_block() -> None:
    assert dump({"template": "{{ a }}\n  {{ b }}"}) == "template: |-\n  {{ a }}\n    {{ b }}\n"


@given(
    st.recursive(
        SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    )
)
def test_what_is_written_is_read_as_the_same_value(value: Any) -> None:
    read = parse(dump({"value": value})).value["value"]
    assert repr(read) == repr(value)  # 1 and 1.0 and true are told apart
