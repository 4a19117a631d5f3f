"""One version, in one place, that the changelog, the citation and the deployment files follow."""

import re

import yaml

from penstock import __version__
from tests.conftest import ROOT


def test_changelog_citation_and_images_name_the_version_that_the_package_has():
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert newest[1] == __version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    for file in ("deploy/kubernetes/kustomization.yaml", "deploy/kubernetes/work-pool.json"):
        tags = re.findall(r'(?:newTag: "|/penstock:)([\d.]+)', (ROOT / file).read_text())
        assert tags
        assert {*tags} == {__version__}


def test_hooks_and_workflows_run_what_make_check_and_ci_run():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        tool, *_ = hook["entry"].removeprefix(".venv/bin/").partition(" ")
        assert f"$(BIN)/{tool}" in makefile
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["ci"]
    assert ci["steps"][-1]["run"] == ".ci/run"
    assert len(ci["strategy"]["matrix"]["python"]) == 3
    release = (ROOT / ".github/workflows/release.yml").read_text()
    pattern = re.search(r"sed -n 's/(.+?)/\\1/p'", release)
    assert pattern
    version = (ROOT / "stages/penstock/version.py").read_text()
    assert re.search(pattern[1].replace(r"\(", "(").replace(r"\)", ")"), version, re.M)
