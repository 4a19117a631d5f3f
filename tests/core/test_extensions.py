"""Parts of packages: who has a name, what is imported when, and what their errors say."""

import subprocess
import sys

import pytest

from penstock.core.errors import ConfigError
from penstock.core.extensions import FORMATS, TRACKERS, Registry
from penstock.train.trackers.registry import is_installed
from tests.config.values import faults_of, loads, smallest
from tests.packages import installed, write_package

CODE = """
from penstock.prepare.formats.conversation import Conversation, DatasetFormat

class Odd(DatasetFormat):
    version = 3
    column: str = "q"

    def parse(self, record):
        messages = [{"role": "user", "content": record[self.column]}]
        messages.append({"role": "assistant", "content": record["a"]})
        return Conversation(messages, None, (0.0, 1.0))
"""
ODD = {"penstock.formats": {"odd": "odd_package:Odd"}}


@pytest.fixture
def odd(tmp_path):
    with installed(write_package(tmp_path / "odd", "odd_package", "1.0", ODD, CODE)):
        yield


def dataset(**fields):
    return {"data": {"datasets": [{"path": "rows.jsonl", **fields}]}}


def registries():
    from penstock.core import extensions

    return [part for part in vars(extensions).values() if isinstance(part, Registry)]


@pytest.mark.parametrize("registry", registries(), ids=lambda registry: registry.group)
def test_every_part_of_ours_is_where_the_table_says(registry):
    for name in registry.builtins:
        if registry is not TRACKERS or is_installed(name):
            assert registry.load(name) is not None
        assert registry.record(name) is None


@pytest.mark.usefixtures("odd")
def test_a_part_is_recorded_with_its_package_and_all_its_options():
    assert FORMATS.record("odd", {}) == {
        "package": "odd_package 1.0",
        "version": 3,
        "options": {"column": "q"},
    }


@pytest.mark.usefixtures("odd")
def test_options_of_a_part_are_judged_like_settings():
    loads(smallest(**dataset(type="odd", type_kwargs={"column": "question"})))
    [fault] = faults_of(**dataset(type="odd", type_kwargs={"colunm": "question"}))
    assert fault == "data.datasets.0.type_kwargs.colunm: unknown option of odd; it has column"
    [fault] = faults_of(**dataset(type="odd", type_kwargs={"column": 3}))
    assert fault == "data.datasets.0.type_kwargs.column: input should be a valid string"
    [fault] = faults_of(**dataset(type="chat", type_kwargs={"column": "question"}))
    assert "chat has no options" in fault
    [fault] = faults_of(**dataset(type="odd", roles_to_train=["user"]))
    assert "odd has options of its own" in fault


@pytest.mark.usefixtures("odd")
def test_an_unknown_name_is_told_the_nearest_one_also_of_a_package():
    [fault] = faults_of(**dataset(type="ood"))
    assert "did you mean odd?" in fault
    assert "chat" in fault


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize("name", ["chat", "odd"])
def test_a_name_of_two_packages_is_refused_with_both(tmp_path, name):
    other = {"penstock.formats": {name: "other:Odd"}}
    with installed(
        tmp_path / "odd", write_package(tmp_path / "other", "other", "2.0", other, CODE)
    ):
        [fault] = faults_of(**dataset(type=name))
    owner = "odd_package 1.0" if name == "odd" else "penstock "
    assert owner in fault
    assert "other 2.0" in fault


def test_a_package_that_cannot_be_imported_is_named_only_where_it_is_used(tmp_path):
    code = "import no_such_module"
    with installed(write_package(tmp_path, "odd_package", "1.0", ODD, code)):
        loads(smallest())
        assert "odd_package" not in sys.modules
        [fault] = faults_of(**dataset(type="odd"))
    assert "odd_package 1.0 cannot be imported" in fault
    assert "No module named 'no_such_module'" in fault
    assert f"{tmp_path}/odd_package.py:1" in fault


def test_what_is_no_part_is_refused(tmp_path):
    with installed(write_package(tmp_path, "odd_package", "1.0", ODD, "def Odd(): ...")):
        [fault] = faults_of(**dataset(type="odd"))
    assert "odd_package:Odd, which is no" in fault
    assert "DatasetFormat" in fault


def test_importing_penstock_and_its_help_import_neither_torch_nor_packages(tmp_path):
    folder = write_package(tmp_path, "odd_package", "1.0", ODD, "raise SystemExit('imported')")
    code = (
        "import sys; sys.argv = ['penstock', '--help']; import penstock;"
        "from penstock.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'odd_package'} & set(sys.modules)"
    )
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)


def test_an_unknown_part_outside_of_a_config_is_an_error_with_all_names():
    with pytest.raises(ConfigError, match=r"Did you mean chat\?") as refusal:
        FORMATS.find("chatt")
    assert "penstock.formats" in str(refusal.value)
