"""Files that are no config, or a damaged one: told with file and line."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.mistakes.table import Mistake, edit, link, make_and_judge, pipe, write


def file(line: str, content: str | bytes, name: str = "run.yaml") -> Mistake:
    return Mistake(line, f"check {name}", make=write(name, content))


def replaced(line: str, old: str, new: str) -> Mistake:
    def change(text: bytes) -> bytes:
        assert old.encode() in text
        return text.replace(old.encode(), new.encode())

    return Mistake(line, make=edit(change))


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcde", "bcdef", strict=True)
)

MISTAKES = {
    "UTF-16": Mistake(
        r"run\.yaml:1: byte 0xff is not UTF-8", make=edit(lambda b: b.decode().encode("utf-16"))
    ),
    "Latin-1": Mistake(
        r"run\.yaml:15: byte 0xe9 is not UTF-8", make=edit(lambda b: b + "# é\n".encode("latin-1"))
    ),
    "a null character": Mistake(r"run\.yaml:15: not valid YAML", make=edit(lambda b: b + b"\0\n")),
    "bytes": file(r"b\.yaml:2: byte 0x80 is not UTF-8", bytes(range(256)), "b.yaml"),
    "JSON with a wrong value": file(
        r"run\.json:1: data\.datasets: required",
        json.dumps({"model": {"config_path": "builtin:tiny-qwen3"}, "train": {"lr": "x"}}),
        "run.json",
    ),
    "TOML": file(r"run\.toml:2: not valid YAML", "[model]\nconfig_path = 'x'\n", "run.toml"),
    "Python": file(r"run\.py:1: the top level is not a mapping", "model = dict(x=1)\n", "run.py"),
    "Markdown": file(r"R\.md:3: the top level is not a mapping", "# Hi\n\ntext\n- a\n", "R.md"),
    "a folder": Mistake(r"dd is a folder; write", "check dd", make=lambda d: (d / "dd").mkdir()),
    "a pipe": Mistake(r"f\.yaml is a device or a pipe", "check f.yaml", make=pipe("f.yaml")),
    "an endless device": Mistake(r"/dev/zero is a device or a pipe", "check /dev/zero"),
    "the null device": Mistake(r"/dev/null is a device or a pipe", "check /dev/null"),
    "a file of another size": file(
        r"big\.yaml has 16,777,217 bytes", b"#" * ((16 << 20) + 1), "big.yaml"
    ),
    "a broken link": Mistake(
        r"l\.yaml does not exist: it is a link to nowhere\.yaml",
        "check l.yaml",
        make=link("l.yaml", "nowhere.yaml"),
    ),
    "a link to itself": Mistake(
        r"l\.yaml cannot be read: too many levels", "check l.yaml", make=link("l.yaml", "l.yaml")
    ),
    "a file below a file": Mistake(r"not a directory", "check run.yaml/x.yaml"),
    "a name that is too long": Mistake("cannot be read: file name too long", f"check {'x' * 300}"),
    "a user that is none": Mistake(r"~nobodyxyz is no user of this machine", "check ~nobodyxyz/x"),
    "two documents": Mistake(
        r"run\.yaml:15: not valid YAML: .*another document", make=edit(lambda b: b + b"---\nm: 1\n")
    ),
    "an anchor within itself": file(r"run\.yaml:1: .*contains it", "model: &a\n  x: *a\n"),
    "an alias of nothing": file(r"run\.yaml:1: .*undefined alias 'a'", "model: *a\n"),
    "a tag that runs code": file(
        r"run\.yaml:1: model: the tag !!python/object/apply:os\.system is not supported",
        "model: !!python/object/apply:os.system ['ls']\n",
    ),
    "aliases that multiply": file(r"run\.yaml:1: .*expands to more than", BOMB),
    "nested without end": file(r"nested too deeply", "model: " + "[" * 3000 + "]" * 3000 + "\n"),
    "a number for a key": Mistake(
        r"run\.yaml:15: 5: unknown field", make=edit(lambda b: b + b"5: x\n")
    ),
    "null for a key": Mistake(
        r"run\.yaml:15: ~: unknown field", make=edit(lambda b: b + b"~: x\n")
    ),
    "a list for a key": Mistake(
        r"line 15 has a list or mapping as a key", make=edit(lambda b: b + b"? [a, b]\n: x\n")
    ),
    "an indent too deep": file(
        r"run\.yaml:3: not valid YAML", "model:\n  config_path: x\n   lr: 2\n"
    ),
    "no space after a colon": file(
        r"run\.yaml:1: model: is the text config_path:x; wanted a mapping",
        "model:\n  config_path:x\n",
    ),
    "= for a colon": file(
        r"run\.yaml:1: model: is the text config_path = x", "model:\n  config_path = x\n"
    ),
    "a path of Windows in quotes": file(
        r"run\.yaml:2: not valid YAML: .*escape", 'model:\n  model_path: "C:\\Users\\x"\n'
    ),
    "a section that is true": Mistake(
        r"run\.yaml:15: lora: is true; wanted a mapping", make=edit(lambda b: b + b"lora: true\n")
    ),
    "a section that is a list": Mistake(
        r"run\.yaml:15: lora: is a list; wanted a mapping",
        make=edit(lambda b: b + b"lora: [enable_lora]\n"),
    ),
    "a field twice": replaced(
        r"run\.yaml:14: train\.lr: written twice, first in line 13",
        "train:\n",
        "train:\n  lr: 1.0e-5\n  lr: 1.0e-4\n",
    ),
    "a section in capitals": replaced(
        r"run\.yaml:12: Train: .*did you mean train", "train:", "Train:"
    ),
    "a field in capitals": replaced(
        r"run\.yaml:13: train\.LR: .*did you mean lr\?", "train:\n", "train:\n  LR: 1\n"
    ),
    "hyphens": replaced(r"train\.output_dir: required", "output_dir", "output-dir"),
    "a conflict of git": Mistake(
        r"run\.yaml:2: not valid YAML",
        make=edit(lambda b: b"<<<<<<< HEAD\n" + b + b"=======\n>>>>>>> x\n"),
    ),
    "typographic quotes": replaced(
        "“builtin:tiny-qwen3” is neither a path", "builtin:tiny-qwen3", "“builtin:tiny-qwen3”"
    ),
    "dotted names": file(r"run\.yaml:1: data\.datasets: required", "model.config_path: x\n"),
    "braces of a template": file(
        r"run\.yaml:1: data\.datasets: required", "model:\n  model_path: {{ model }}\n"
    ),
    "axolotl with a misspelt type": file(
        r"a\.yml:4: datasets\.0\.type: 'alpacaa' has no counterpart; did you mean alpaca\?",
        "base_model: x/y\ndatasets:\n  - path: rows.jsonl\n    type: alpacaa\nadapter: lora\n",
        "a.yml",
    ),
    "a value of transformers' arguments": file(
        r"a\.yml:\d: ",
        "model_name_or_path: ./m\nper_device_train_batch_size: 2\nlearning_rate: fast\n",
        "a.yml",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_file_that_is_no_config_is_told_with_its_place(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_and_judge(MISTAKES[mistake], tmp_path)


@pytest.mark.parametrize(
    "change",
    [lambda text: b"\xef\xbb\xbf" + text, lambda text: text.replace(b"\n", b"\r\n")],
    ids=["a byte order mark", "line ends of Windows"],
)
def test_harmless_forms_of_a_config_are_read(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_and_judge(Mistake(re.escape("ok: model: "), make=edit(change), code=0), tmp_path)
