"""The nearest valid name of an unknown config key ("did you mean")."""

from difflib import get_close_matches
from typing import Any

from penstock.config.loading.aliases import SYNONYMS
from penstock.config.loading.fault import Steps
from penstock.config.loading.schema_tree import annotation_at, is_section, sections
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig

NEAR_ENOUGH = 0.72
VERY_NEAR = 0.85


def suggest(path: Steps, root: type[ConfigSection] = RunConfig) -> str | None:
    """The most similar setting to the unknown `path`: the bare name of one in the same section or,
    in a run, the full name of one elsewhere."""
    name = str(path[-1])
    if name.lower() != name and (meant := suggest((*path[:-1], name.lower()), root)):
        return meant
    section = annotation_at(path[:-1], root)
    siblings = list(section.model_fields) if is_section(section) else []
    if name in siblings:
        return name
    if near := get_close_matches(name, siblings, 1, VERY_NEAR):
        return near[0]
    if root is not RunConfig:
        bare = SYNONYMS.get(name.lower(), "").rpartition(".")[2]
        near = [bare] if bare in siblings else get_close_matches(name, siblings, 1, NEAR_ENOUGH)
        return near[0] if near else None
    if meant := SYNONYMS.get(name.lower()):
        return _from(section, meant)
    homes = [
        f"{section_name}.{name}"
        for section_name, kind in sections().items()
        if name in kind.model_fields
    ]
    if homes:
        return homes[0]
    if near := get_close_matches(name, siblings, 1, NEAR_ENOUGH) or _completed(name, siblings):
        return near[0]
    elsewhere = {
        field: section_name
        for section_name, kind in sections().items()
        for field in kind.model_fields
    }
    if near := get_close_matches(name, elsewhere, 1, VERY_NEAR):
        return f"{elsewhere[near[0]]}.{near[0]}"
    if near := get_close_matches(name.lower(), SYNONYMS, 1, VERY_NEAR):
        return _from(section, SYNONYMS[near[0]])
    return None


def _from(section: Any, setting: str) -> str:
    """The name of a setting as seen from `section`: bare if it is in that section."""
    section_name, _, bare = setting.rpartition(".")
    return bare if sections().get(section_name) is section else setting


def _completed(name: str, names: list[str]) -> list[str]:
    """The only name that begins with this one."""
    matches = [candidate for candidate in names if candidate.startswith(name)]
    return matches if len(matches) == 1 else []
