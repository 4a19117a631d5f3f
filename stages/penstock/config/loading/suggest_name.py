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
    here = list(section.model_fields) if is_section(section) else []
    if name in here:
        return name
    if near := get_close_matches(name, here, 1, VERY_NEAR):
        return near[0]
    if root is not RunConfig:
        bare = SYNONYMS.get(name.lower(), "").rpartition(".")[2]
        near = [bare] if bare in here else get_close_matches(name, here, 1, NEAR_ENOUGH)
        return near[0] if near else None
    if meant := SYNONYMS.get(name.lower()):
        return _from(section, meant)
    homes = [f"{place}.{name}" for place, one in sections().items() if name in one.model_fields]
    if homes:
        return homes[0]
    if near := get_close_matches(name, here, 1, NEAR_ENOUGH) or _completed(name, here):
        return near[0]
    elsewhere = {field: place for place, one in sections().items() for field in one.model_fields}
    if near := get_close_matches(name, elsewhere, 1, VERY_NEAR):
        return f"{elsewhere[near[0]]}.{near[0]}"
    if near := get_close_matches(name.lower(), SYNONYMS, 1, VERY_NEAR):
        return _from(section, SYNONYMS[near[0]])
    return None


def _from(section: Any, setting: str) -> str:
    """The name of a setting as seen from `section`: bare if it is in that section."""
    place, _, bare = setting.rpartition(".")
    return bare if sections().get(place) is section else setting


def _completed(name: str, names: list[str]) -> list[str]:
    """The only name that begins with this one."""
    found = [each for each in names if each.startswith(name)]
    return found if len(found) == 1 else []
