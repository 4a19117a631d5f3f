"""Draws damaged and hostile files, reads them in a process of its own, and judges what was read.

`python -m tests.stages.fuzzing FOLDER` reads the files of a folder and prints a line for each: its
name, the outcome (`read`, `refused`, `unnamed`, `raised`), seconds of the processor, MiB at most so
far, and a digest of the content.
"""

import csv
import hashlib
import io
import json
import resource
import signal
import struct
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

MEMORY = 8 << 30
"""Address space; allocators reserve much of it."""


SECONDS = 60
"""After which a reader of a file is taken to wait for ever."""


def digest(content: object) -> str:
    """Of Python values of any kind."""
    if isinstance(content, dict):
        content = sorted(content.items(), key=repr)  # a library's order is its own
    return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# What Penstock reads.


def _rows(path: Path) -> list[Any]:
    from penstock.core.sources.pin import pin_data
    from penstock.prepare.readers.file_splits import split_source
    from penstock.prepare.readers.registry import read_chunks

    pieces = split_source(pin_data(str(path)), ds_type=None, streaming=False, token=None)
    return [value for piece in pieces for chunk in read_chunks(piece) for value in chunk.values()]


def _tensors(path: Path) -> object:
    from penstock.core.safetensors_header import files_by_tensor, read_header

    if path.suffix == ".json":
        return {name: file.name for name, file in files_by_tensor(path.parent).items()}
    header = read_header(path)
    content = path.read_bytes()
    return {
        name: (list(entry.shape), content[entry.start : entry.start + entry.num_bytes])
        for name, entry in header.items()
    }


def _config(path: Path) -> object:
    from penstock.engine.hf.config import read_hf_config

    return read_hf_config(str(path.parent), {})


def _adapter(path: Path) -> object:
    from penstock.engine.peft.adapter_config import read_peft_config

    return read_peft_config(path.parent)


def _stop_tokens(path: Path) -> object:
    from penstock.rows.tokenizer import load_stop_token_ids

    return load_stop_token_ids(str(path.parent))


def _tokenizer(path: Path) -> object:
    from penstock.rows.tokenizer import load_tokenizer

    return load_tokenizer(str(path.parent))("hello world")["input_ids"]


def _template(path: Path) -> object:
    from penstock.config.schema.data import DataConfig
    from penstock.prepare.chat_templates.resolve import resolve_chat_template

    value = {"datasets": [{"path": "dummy"}], "chat_template": str(path)}
    return resolve_chat_template(DataConfig.model_validate(value))


def _image(path: Path) -> object:
    from penstock.media.decode import decode
    from penstock.media.originals import Originals
    from penstock.media.reference import ImageRef, read_image

    originals = Originals(path.parent / "originals")
    return _pixels(decode(read_image(ImageRef(path.name), path.parent, originals)))


def _pixels(image: Any) -> object:
    """Mode, size and digest; `repr` of its bytes would take four times their memory."""
    pixels = hashlib.sha256()
    for top in range(0, image.height, 256):
        strip = image.crop((0, top, image.width, min(top + 256, image.height)))
        pixels.update(strip.tobytes())
    return image.mode, image.size, pixels.hexdigest()


READERS: dict[str, Callable[[Path], Any]] = {
    "data": _rows,
    "tensors": _tensors,
    "config": _config,
    "adapter": _adapter,
    "stop": _stop_tokens,
    "tokenizer": _tokenizer,
    "template": _template,
    "image": _image,
}
"""By the first part of the name of a file's folder."""


def _stop(*_: object) -> None:
    raise TimeoutError(f"it takes more than {SECONDS} s")


def main(folder: Path) -> None:
    """Read every file `KIND-NUMBER/NAME`."""
    from penstock.core.errors import PenstockError
    from penstock.media.kinds import BadMedia
    from penstock.prepare.bad_records import BadRecord

    signal.signal(signal.SIGALRM, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if {path.name.partition("-")[0] for path in folder.iterdir()} - {"data", "image"}:
        import_module("penstock.rows.tokenizer")  # of transformers, whose seconds are not a file's
    for path in sorted(each for each in folder.glob("*/*") if each.name != "originals"):
        kind = path.parent.name.partition("-")[0]
        start, result = time.process_time(), ""
        signal.alarm(SECONDS)
        try:
            values = READERS[kind](path)
            if kind == "data":
                bad = sum(isinstance(value, BadRecord) for value in values)
                values = [value for value in values if not isinstance(value, BadRecord)]
                outcome, result = f"read{'-some' if bad else ''}", digest(values)
            else:
                outcome, result = "read", digest(values)
        except PenstockError as error:
            is_named = path.name in str(error) or str(path.parent) in str(error)
            outcome = "refused" if is_named else "unnamed"
            result = "" if is_named else repr(str(error))[:300]
        except BadMedia:  # its record is named where it is known
            outcome = "refused"
        except BaseException as error:  # noqa: BLE001
            # The command line names the file of an error of the system.
            is_named = isinstance(error, OSError) and error.filename == str(path)
            outcome = "refused" if is_named else "raised"
            result = repr(error)[:300].replace("\n", " ")
        signal.alarm(0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        took = time.process_time() - start
        name = f"{path.parent.name}/{path.name}"
        print(f"{name}\t{outcome}\t{took:.1f}\t{peak}\t{result}", flush=True)


# What independent readers read; None where they refuse.


def judge(path: Path) -> str | None:
    """The digest of the content as libraries read it; None if they refuse it, or do not judge."""
    kind = path.parent.name.partition("-")[0]
    try:
        if kind == "data":
            return digest(_judge_rows(path))
        if kind == "tensors" and path.suffix == ".safetensors":
            return digest(_judge_tensors(path))
        if kind == "image":
            return digest(_judge_image(path))
    except Exception:  # noqa: BLE001 - a refusal
        return None
    return None


def _judge_rows(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        table = pq.read_table(path)
        table.validate(full=True)
        return table.to_pylist()
    if path.suffix == ".arrow":
        table = pa.ipc.open_file(path).read_all()
        table.validate(full=True)
        return table.to_pylist()
    content = path.read_bytes()
    if path.suffix == ".tar":
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            return [json.loads(archive.extractfile(info).read()) for info in archive]  # pyright: ignore[reportOptionalMemberAccess]
    if path.suffix == ".csv":
        csv.field_size_limit(1 << 30)
        rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        return list(rows)
    if path.suffix == ".txt":
        lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        lines = lines if lines[-1] else lines[:-1]
        return [{"text": line.rstrip(b"\r").decode()} for line in lines]
    if path.suffix == ".json":
        return json.loads(content)
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def _judge_tensors(path: Path) -> Any:
    from safetensors import deserialize

    return {
        name: (entry["shape"], bytes(entry["data"]))
        for name, entry in deserialize(path.read_bytes())
    }


def _judge_image(path: Path) -> Any:
    from PIL import Image
    from transformers.image_utils import load_image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _pixels(load_image(Image.open(io.BytesIO(path.read_bytes()))))


# How files are damaged.


def damaged(content: bytes, draw: Any) -> bytes:
    """The content with one to three changes."""
    for _ in range(draw.choice([1, 1, 2, 3])):
        content = draw.choice(DAMAGES)(content, draw, draw.randrange(len(content) or 1))
    return content


HUGE = [-1, 0, 1, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1]

DAMAGES: list[Callable[[bytes, Any, int], bytes]] = [
    lambda content, _, at: content[:at],
    lambda content, draw, at: (
        content[:at]
        + bytes([(content[at : at + 1] or b"\0")[0] ^ 1 << draw.randrange(8)])
        + content[at + 1 :]
    ),
    lambda content, draw, at: content[:at] + draw.randbytes(8) + content[at + 8 :],
    lambda content, draw, at: (
        content[:at] + struct.pack("<q", draw.choice(HUGE)) + content[at + 8 :]
    ),
    lambda content, draw, at: (
        content[:at]
        + struct.pack(draw.choice("<>") + "i", draw.choice(HUGE[:5]))
        + content[at + 4 :]
    ),
    lambda content, _, at: content[:at] + bytes(512) + content[at + 512 :],
    lambda content, draw, at: content[:at] + content[draw.randrange(len(content) or 1) :],
    lambda content, _, at: content[at:],
    lambda content, _, at: content[:at] + content,
    lambda content, _, at: content[:at] + b"\xff\xfe" + content[at:],
    lambda content, _, at: content[:at] + b"\0" + content[at:],
    lambda content, _, __: b"\xef\xbb\xbf" + content,
    lambda content, _, at: content[:at] + b"[" * 100_000 + content[at:],
    lambda content, _, at: content[:at] + b'{"a":' * 100_000 + content[at:],
    lambda content, draw, _: _with_json(content, draw),
]


def _with_json(content: bytes, draw: Any) -> bytes:
    """JSON with a value of another type or size, or a key twice."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content + b"\n" + content[: draw.randrange(len(content) or 1)]
    if not isinstance(value, dict) or not value:
        return json.dumps({"a": value}).encode()
    name = draw.choice(list(value))
    other = draw.choice(
        [None, -1, 0, 1 << 70, 1e308, "", "a", "\0", "\ud800", [], {}, [[]], {"a": {}}, True]
    )
    if draw.random() < 0.2:
        text = json.dumps(value)
        return f"{text[:-1]}, {json.dumps(name)}: {json.dumps(other)}}}".encode()
    return json.dumps({**value, name: other}).encode()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
