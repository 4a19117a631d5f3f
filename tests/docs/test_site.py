"""The documentation as a site."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()
NAMED = set(re.findall(r"(\S+\.md)$", CONFIG.partition("\nnav:")[2], re.MULTILINE))


def test_the_navigation_of_the_site_has_every_page():
    pages = {str(f.relative_to(ROOT / "docs")) for f in (ROOT / "docs").rglob("*.md")}
    assert {page for page in NAMED if not page.startswith("repository/")} == pages
    others = {ROOT / page.removeprefix("repository/") for page in NAMED - pages}
    assert [str(file) for file in others if not file.is_file()] == []


def build(folder, out):
    """Build the site of a copy of the repository's pages."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
@pytest.mark.skipif(not importlib.util.find_spec("material"), reason="needs the extra `site`")
def test_the_site_is_built_and_a_broken_link_is_an_error(tmp_path):
    for name in ("docs", "configs", "deploy", "flows", "kernels", "stages", "tests"):
        kept = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=kept)
    for name in ("mkdocs.yml", "README.md", "prefect.yaml", "Dockerfile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr
    start = (tmp_path / "site" / "index.html").read_text()
    assert 'href="repository/configs/REFERENCE/"' in start
    page = tmp_path / "docs" / "guide" / "plan.md"
    for broken in ("gone.md", "data.md#gone"):
        page.write_text((ROOT / "docs/guide/plan.md").read_text() + f"\n[x]({broken})\n")
        assert build(tmp_path, tmp_path / "site").returncode == 1, broken
