"""Every field of the reference documents has an effect that a test notices, or what becomes of it
is said: refused, approximated or without effect, with a reason. None is dropped in silence."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading.schema_tree import sections
from penstock.config.loading.validate import validate
from penstock.config.server.config import ServerConfig
from penstock.config.translate.erniekit.rules import ERNIEKIT
from penstock.config.translate.nxdt.rules import NXDT
from penstock.config.translate.translation import FATAL, Line
from tests.config.dialects import erniekit_keys, nxdt_keys, test_erniekit, test_nxdt
from tests.config.values import smallest
from tests.conftest import SHARED
from tests.mutate.table import read_rows

DOCUMENTS, SPEC = SHARED / "seeds", SHARED / "spec"
pytestmark = pytest.mark.skipif(
    not (DOCUMENTS.is_dir() and SPEC.is_dir()), reason="needs ../shared/seeds and ../shared/spec"
)

SECTIONS = {
    "model section": "model",
    "data section": "data",
    "Dataset entry fields": "data.datasets[]",
    "lora section": "lora",
}
"""Headings of the document of a run; all others are of fields of `train`."""

NOTICED = ("noticed", "refused", "explained")
SAID = 10
"""The least number of characters of a reason."""


def text_of(number: str) -> str:
    [document] = DOCUMENTS.glob(f"{number}_*.txt") if DOCUMENTS.is_dir() else [Path("/dev/null")]
    return document.read_text()


def fields_of_run() -> list[str]:
    """The fields in the tables of the document of a run."""
    heading, names = "", list[str]()
    for line in text_of("000").splitlines():
        if found := re.search(r"Section titled “(.+?)”", line):
            heading = found[1]
        if found := re.match(r"(\w+) \| .+? \| ", line):
            names.append(f"{SECTIONS.get(heading, 'train')}.{found[1]}")
    return names


def fields_of_server() -> list[str]:
    """The fields in the tables of a server's document, whose cells follow one another unparted: the
    longest name that a line begins with."""
    known = sorted(ServerConfig.model_fields, key=len, reverse=True)
    tables = re.findall(r"^FieldDefaultDescription\n((?:.+\n?)+)", text_of("002"), re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [next((name for name in known if line.startswith(name)), line) for line in lines]


def keys_of_erniekit() -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", text_of("003"), re.MULTILINE)


def keys_of_nxdt() -> list[str]:
    """The leaf keys of the blocks of settings in the document, without the sections above them."""
    return sorted({*re.findall(r"^\s*(\w[\w.]*):(?: .*)?$", text_of("004"), re.MULTILINE)})


def written_defaults() -> list[tuple[str, str, Any]]:
    if not SPEC.is_dir():
        return []
    rows = yaml.safe_load((SPEC / "local_fields.yaml").read_text())
    return [
        (row["section"], row["field"], row["default"])
        for row in rows
        if row["default"] is not None and not str(row["default"]).startswith(("=", "REQUIRED"))
    ]


def unnoticed(names: Iterable[str]) -> list[str]:
    """The settings whose effect no test notices, of these, with elements of lists and parts of
    mappings in dotted notation."""
    rows, missing = read_rows(), list[str]()
    for name in names:
        row = re.sub(r"\.\d+(?=\.|$)", "[]", name).replace("test_datasets[]", "datasets[]")
        while row not in rows and "." in row:
            row = row.rpartition(".")[0]
        if row not in rows or rows[row].outcome not in NOTICED:
            missing.append(name)
    return missing


def test_every_field_of_a_run_has_an_effect_that_a_test_notices() -> None:
    names = fields_of_run()
    assert (len(names), len({*names})) == (135, 135)
    assert [n for n in names if (at := n.rpartition("."))[2] not in fields(at[0])] == []
    assert unnoticed(names) == []


def fields(place: str) -> Iterable[str]:
    return sections()[place].model_fields


def test_every_field_of_a_server_has_an_effect_that_a_test_notices() -> None:
    names = fields_of_server()
    assert (len(names), len({*names})) == (82, 82)
    assert unnoticed(f"server.{name}" for name in names) == []


@pytest.mark.parametrize(("place", "name", "value"), written_defaults())
def test_a_default_as_documented_arrives_or_is_said_to_be_unusable(
    place: str, name: str, value: Any
) -> None:
    written: dict[str, Any] = {name: value}
    if place == "data.datasets[]":
        written = {"datasets": [{"path": "dummy", **written}]}
    if name == "quant_group_size":
        written |= {"enable_qlora": True}
    section = place.partition(".")[0]
    result = validate(smallest(**{section: written}))
    said = [*(issue.path[-1] for issue in result.faults), *result.notices]
    at: Any = getattr(result.run, section)
    at = at.datasets[0] if place == "data.datasets[]" else at
    arrived = at.resolved_group_size if name == "quant_group_size" else getattr(at, name)
    assert arrived == value or [line for line in said if name in str(line)]


def judge(line: Line) -> None:
    """Assert that what becomes of a key is an effect that is noticed, or is said."""
    assert line.kind != "unknown"
    if line.kind in ("maps", "translated"):
        assert line.names or line.why
        assert unnoticed(line.names) == []
    else:
        assert len(line.why) > SAID


@pytest.mark.parametrize("key", keys_of_erniekit())
def test_every_key_of_erniekits_document_has_an_effect_or_a_reason(key: str) -> None:
    value, beside = erniekit_keys.CHANGES.get(key, ("1", {}))
    judge(test_erniekit.line_of(test_erniekit.translated(**{**beside, key: value}), key))


def documented_paths() -> list[str]:
    if not SPEC.is_dir():
        return []
    rows = yaml.safe_load((SPEC / "dialect_map.yaml").read_text())
    return [row["key"] for row in rows if row["dialect"] == "nxdt" and row["in_seed"]]


@pytest.mark.parametrize("key", documented_paths())
def test_every_key_of_nxdts_document_has_an_effect_or_a_reason(key: str) -> None:
    lora = nxdt_keys.LORA if key.startswith(nxdt_keys.PEFT) else {}
    value, beside = nxdt_keys.CHANGES.get(key, ("1", lora))
    judge(test_nxdt.line_of(test_nxdt.translated({**beside, key: value}), key))


def test_no_key_of_a_block_in_nxdts_document_is_unknown() -> None:
    names = keys_of_nxdt()
    assert len(names) > 90
    known = {part for key in NXDT.keys for part in key.split(".")}
    assert [name for name in names if name not in known] == []


def test_the_documents_have_as_many_keys_as_are_judged() -> None:
    assert len(keys_of_erniekit()) == 106
    assert {*keys_of_erniekit()} <= ERNIEKIT.keys
    assert len(documented_paths()) == 108
    assert FATAL == ("refused", "unknown")
