"""References within a file, judged by what OmegaConf documents of them."""

import time
from typing import Any

import pytest

from penstock.config.translate.interpolation import resolve_references
from penstock.core.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"a": {"b": 3}, "c": "${a.b}"}, 3),
        ({"a": {"b": [1, 2]}, "c": "${a.b.1}"}, 2),
        ({"a": {"b": {"d": 1.5}}, "c": "${a.b}"}, {"d": 1.5}),
        ({"a": None, "c": "${a}"}, None),
        ({"a": True, "c": "x-${a}-{step}"}, "x-True-{step}"),
        ({"a": 2, "b": "${a}", "c": "${multiply:${b}, 1e1}"}, 20.0),
        ({"a": 2, "c": "${multiply:${a},${multiply:${a},3}}"}, 12),
        ({"a": "b", "b": 7, "c": "${${a}}"}, 7),
    ],
)
def test_a_reference_is_what_it_refers_to(values: dict[str, Any], want: Any) -> None:
    found = resolve_references(values)["c"]
    assert (found, type(found)) == (want, type(want))


def test_a_relative_reference_begins_where_it_stands() -> None:
    values = {"m": {"long": 4, "same": "${.long}", "deep": {"up": "${..long}"}}}
    assert resolve_references(values)["m"] == {"long": 4, "same": 4, "deep": {"up": 4}}


def test_references_within_lists_are_followed() -> None:
    assert resolve_references({"a": 1, "c": ["${a}", {"d": "${a}"}]})["c"] == [1, {"d": 1}]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"c": "${a.b}"}, r"c: \$\{a.b\} refers to a.b, which does not exist"),
        ({"a": 1, "c": "${a.b}"}, "which does not exist"),
        ({"a": "${c}", "c": "${a}"}, "refers to itself"),
        ({"c": "${oc.env:HOME}"}, "is not supported, only multiply"),
        ({"c": "${multiply:2}"}, "of two numbers"),
        ({"c": "${multiply:a,2}"}, "of two numbers"),
    ],
)
def test_a_reference_to_nothing_is_told(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_references(values)


@pytest.mark.parametrize("kind", [str, list])
def test_a_file_that_doubles_itself_is_refused_at_once(kind: type) -> None:
    values: dict[str, Any] = {"v0": "0123456789"}
    for level in range(1, 40):
        last = f"${{v{level - 1}}}"
        values[f"v{level}"] = last * 2 if kind is str else [last, last]
    begun = time.perf_counter()
    with pytest.raises(ConfigError, match="expand to too much"):
        resolve_references(values)
    assert time.perf_counter() - begun < 5
