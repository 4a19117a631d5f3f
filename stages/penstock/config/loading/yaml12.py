"""A YAML 1.2 parser that remembers the line of every value.

PyYAML implements YAML 1.1, where `1e-5` is text and `no` is false. Only its parser is used here;
plain scalars are converted by the core schema of YAML 1.2 (section 10.3.2 of the specification).
Keys are always text.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from penstock.config.loading.fault import ConfigIssue, Steps

# Tag of a scalar without quotes and without a tag.
PLAIN = "plain"

PREFIX = "tag:yaml.org,2002:"
MERGE = "<<"

# Maximum number of values: a file of a few lines can expand to billions through anchors.
MOST_VALUES = 100_000

# Maximum nesting: far more than configs need, far less than Python's stack allows.
DEEPEST = 50

# Line and column, from 1.
Mark = tuple[int, int]

CORE: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = (
    ("null", re.compile(r"null|Null|NULL|~|"), lambda text: None),  # noqa: ARG005
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text[0] in "tT"),
    ("int", re.compile(r"[-+]?[0-9]+"), int),
    ("int", re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    ("int", re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    ("float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    ("float", re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    ("float", re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),  # noqa: ARG005
)


@dataclass(frozen=True)
class Place:
    """The position of a value and, in a mapping, of its key."""

    value: Mark
    key: Mark | None = None

    @property
    def line(self) -> int:
        """The line to report: that of the key or of the list entry."""
        return (self.key or self.value)[0]


class YamlError(ValueError):
    """The text is not YAML. `line` is 1 or more."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


@dataclass
class Document:
    """A value, the positions in it, and errors that did not prevent parsing."""

    value: Any = None
    positions: dict[Steps, Place] = field(default_factory=dict[Steps, Place])
    faults: list[ConfigIssue] = field(default_factory=list[ConfigIssue])


def parse(text: str) -> Document:
    """Parse the YAML document in `text`. Raises YamlError."""
    try:
        loader = _Loader(text)
        try:
            # Nodes alone: no constructor of PyYAML runs, so no tag can make an object.
            root = loader.get_single_node()
        finally:
            # As `yaml.load` does: the parser refers to itself, and would stay until a collection.
            loader.dispose()  # pyright: ignore[reportUnknownMemberType]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(mark.line + 1 if mark else 1, _problem(error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = (
            f"the character U+{error.character:04X}"
            if isinstance(error.character, int)
            else "a byte"
        )
        raise YamlError(line, f"{problem} is not allowed in YAML") from None
    # PyYAML's composer calls itself for each level, before the limit of `_Builder` is reached.
    except RecursionError:
        raise YamlError(1, "nested too deeply") from None
    document = Document()
    if root is not None:
        document.value = _Builder(document).build(root, ())
    return document


def scalar(text: str) -> Any:
    """The value of a plain scalar: `text` itself if it is not null, a boolean or a number."""
    for _, pattern, convert in CORE:
        if pattern.fullmatch(text):
            try:
                return convert(text)
            except ValueError:
                return text
    return text


def dump(value: Any) -> str:
    """YAML that `parse` reads as the same value; mappings keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 would read as another type, such as `1e-5`, and repeats shared
    values."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(_: yaml.SafeDumper, text: str) -> ScalarNode:
    is_other = any(pattern.fullmatch(text) for _, pattern, _ in CORE)
    style = "'" if is_other else None
    if not text.isprintable():
        # In other styles PyYAML folds some breaks of lines, and a block it cannot write is escaped.
        style = "|" if text.replace("\n", "").isprintable() else '"'
    return ScalarNode(f"{PREFIX}str", text, style=style)


_Dumper.add_representer(str, _text)


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem:
        return "tabs are not allowed here; indent with spaces"
    if error.context and error.context_mark:
        return f"{problem}, {error.context} that begins in line {error.context_mark.line + 1}"
    return problem


class _Loader(yaml.SafeLoader):
    """PyYAML's parser, without conversion of plain scalars."""

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> str:  # noqa: ARG002
        if kind is ScalarNode:
            # A pair: whether the scalar needs no tag if it is plain, and if it is quoted.
            return PLAIN if implicit[0] else f"{PREFIX}str"
        return f"{PREFIX}map" if kind is MappingNode else f"{PREFIX}seq"


class _Builder:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()
        self._count = 0

    def build(self, node: Node, path: Steps, key: Node | None = None) -> Any:
        """The value of `node` at `path`."""
        self._count_value(node)
        if len(path) > DEEPEST:
            raise YamlError(_mark(node)[0], f"nested too deeply, more than {DEEPEST} levels")
        self._document.positions[path] = Place(_mark(node), _mark(key) if key else None)
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        # PyYAML composes an alias to the node that it names, so a cycle is a node within itself.
        if id(node) in self._open:
            raise YamlError(_mark(node)[0], "an alias refers to a value that contains it")
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode) and node.tag == f"{PREFIX}map":
                return self._mapping(node, path)
            if isinstance(node, SequenceNode) and node.tag == f"{PREFIX}seq":
                return [self.build(entry, (*path, index)) for index, entry in enumerate(node.value)]
            self._fault(path, f"the tag {_spelled(node.tag)} is not supported; leave it out")
            return None
        finally:
            self._open.remove(id(node))

    def _count_value(self, node: Node) -> None:
        # Aliases of aliases double at each level.
        self._count += 1
        if self._count > MOST_VALUES:
            raise YamlError(_mark(node)[0], f"it expands to more than {MOST_VALUES} values")

    def _mapping(self, node: MappingNode, path: Steps) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self._fault(
                    path, f"line {_mark(key)[0]} has a list or mapping as a key; keys are text"
                )
                continue
            if _is_merge(key):
                continue
            name = str(key.value)
            # PyYAML would keep the last of equal keys without a word.
            if name in values:
                raise_at = (*path, name)
                self._document.positions[raise_at] = Place(_mark(value), _mark(key))
                self._fault(
                    raise_at, f"written twice, first in line {lines[name]}; keep one of them"
                )
                continue
            lines[name] = _mark(key)[0]
            values[name] = self.build(value, (*path, name), key)
        for source, key in self._merged(node, path):
            name = str(key.value)
            if name not in values:
                values[name] = self.build(source, (*path, name), key)
        return values

    def _merged(self, node: MappingNode, path: Steps) -> Iterator[tuple[Node, ScalarNode]]:
        # The entries of merge keys, in order of precedence.
        for key, value in node.value:
            if not (isinstance(key, ScalarNode) and _is_merge(key)):
                continue
            sources = value.value if isinstance(value, SequenceNode) else [value]
            for source in sources:
                self._count_value(source)
                if not isinstance(source, MappingNode):
                    self._fault(path, f"line {_mark(key)[0]} merges a value that is not a mapping")
                    continue
                if id(source) in self._open:
                    raise YamlError(_mark(key)[0], "an alias refers to a value that contains it")
                for inner, entry in source.value:
                    if isinstance(inner, ScalarNode) and not _is_merge(inner):
                        yield entry, inner
                self._open.add(id(source))
                try:
                    yield from self._merged(source, path)
                finally:
                    self._open.remove(id(source))

    def _scalar(self, node: ScalarNode, path: Steps) -> Any:
        text = str(node.value)
        tag = node.tag.removeprefix(PREFIX)
        if tag == "str":
            return text
        for kind, pattern, convert in CORE:
            if tag in (PLAIN, kind) and pattern.fullmatch(text):
                try:
                    return convert(text)
                except ValueError:  # Python limits the digits of an integer
                    self._fault(path, f"a number of {len(text)} digits is too long")
                    return None
        if tag == PLAIN:
            return text
        if tag in {kind for kind, _, _ in CORE}:
            self._fault(path, f"{text!r} is tagged {_spelled(node.tag)} but is not one")
        else:
            self._fault(path, f"the tag {_spelled(node.tag)} is not supported; leave it out")
        return None

    def _fault(self, path: Steps, text: str) -> None:
        self._document.faults.append(ConfigIssue(path, text))


def _is_merge(key: ScalarNode) -> bool:
    # YAML 1.2 has no merge keys any more; files that are in use have them.
    return key.tag == f"{PREFIX}merge" or (key.tag == PLAIN and key.value == MERGE)


def _mark(node: Node) -> Mark:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _spelled(tag: str) -> str:
    return tag.replace(PREFIX, "!!")
