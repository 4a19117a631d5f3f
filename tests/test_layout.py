"""The house rules that no type checker sees."""

import re
import subprocess
import sys

import pytest

from penstock.config.identity import KEYED_SECTIONS
from penstock.config.schema.cache_key import cache_key
from tests.conftest import ROOT

ROOMS = ("flows", "stages", "kernels")
SOURCES = [path for room in (*ROOMS, "tests") for path in sorted((ROOT / room).rglob("*.py"))]
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}


def python(code, *, path=""):
    command = [sys.executable, *(["-P"] if path == "safe" else []), "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def tracked():
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


@pytest.mark.parametrize("room", [*ROOMS, "configs", "artifacts"])
def test_rooms_are_not_packages(room):
    # An __init__.py in kernels/ would shadow Hugging Face's `kernels` for anyone standing here.
    assert not (ROOT / room / "__init__.py").exists()


def test_importing_kernels_never_finds_us():
    # Asked with the repository's root on the path, as `python -c` and `python -m` put it there.
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    assert not python(code).startswith(str(ROOT / "kernels"))
    assert not python(code, path="safe").startswith(str(ROOT / "kernels"))


def test_only_the_engine_speaks_to_ranks():
    speaks = re.compile(r"^\s*(from|import) torch\.distributed|\btorch\.distributed\.", re.M)
    speakers = [str(p.relative_to(ROOT)) for p in SOURCES if speaks.search(p.read_text())]
    # A dry run takes the place of the process group.
    allowed = ("stages/penstock/engine/", "stages/penstock/estimate/dryrun/", "tests/")
    assert [path for path in speakers if not path.startswith(allowed)] == []


def test_only_one_file_reads_the_environment():
    reads = re.compile(r"\bos\.(environ|getenv|putenv)\b")
    readers = [str(p.relative_to(ROOT)) for p in SOURCES if reads.search(p.read_text())]
    allowed = ("stages/penstock/core/env.py", "kernels/penstock_kernels/op.py", "tests/")
    assert [path for path in readers if not path.startswith(allowed)] == []


def test_only_one_file_asks_for_what_only_linux_has():
    only = re.compile(
        r"\"/proc/|\b(prctl|renameat2|sched_\w+affinity|posix_f\w+|sys\.platform|AF_(NETLINK|PACKET)"
        r"|os\.(copy_file_range|eventfd\w*|fdatasync|getrandom|memfd_create|pidfd_open|pipe2|setns"
        r"|splice|timerfd\w*|unshare|\w+xattr|O_(DIRECT|NOATIME|PATH|TMPFILE))"
        r"|select\.epoll|resource\.prlimit|signal\.(SIG(POLL|PWR|RT\w+)|sigtimedwait|sigwaitinfo)"
        r"|SO_(BINDTODEVICE|PEERCRED)|SOCK_(CLOEXEC|NONBLOCK)|TCP_(KEEPIDLE|USER_TIMEOUT))\b"
    )
    files = [path for path in SOURCES if not path.is_relative_to(ROOT / "tests")]
    askers = [str(path.relative_to(ROOT)) for path in files if only.search(path.read_text())]
    assert askers == ["stages/penstock/core/machine/linux.py"]


def test_no_file_exceeds_800_lines():
    assert [p for p in SOURCES if len(p.read_text().splitlines()) > 800] == []


def test_every_module_says_what_it_is_for():
    silent = [
        path
        for path in SOURCES
        if path.read_text().strip()
        and not path.read_text().startswith('"""')
        and "tests" not in path.relative_to(ROOT).parts
    ]
    assert silent == []


def test_no_file_has_a_name_that_says_nothing():
    assert [path for path in SOURCES if path.stem in EMPTY_NAMES] == []


@pytest.mark.parametrize("section", KEYED_SECTIONS)
def test_every_field_says_what_it_has_to_do_with_the_cache_key(section):
    kind = KEYED_SECTIONS[section]
    assert all(cache_key(kind, name).role for name in kind.model_fields)


@pytest.mark.slow
def test_the_files_speak_of_the_project_alone():
    # Spelt apart, so that this file does not find itself.
    words = ["cl" + "aude", "chat" + "gpt", "co" + "pilot", "tic" + "ket", "work" + "place"]
    paths = ["/wo" + "rk/", "/t" + "mp/", "/ho" + "me/", "/ro" + "ot/"]
    issues = [r"\bissue ?#?\d", r"\bthis ses" + "sion"]
    told = re.compile("|".join([*words, *paths, *issues]), re.IGNORECASE)
    # The system message of gpt-oss names its maker's product.
    generated = {"constraints.txt", "gpt-oss.jinja", "gpt-oss.json"}
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path.name not in generated
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if told.search(line)
    ]
    assert found == []
