"""Images of data: prepared once, against transformers' processor called for each sample.

    python -m tests.bench.data.bench_images [--images 2000] [--side 256]

Prints images per CPU second of the prepare stage and of the processor, which a collator calls in
every epoch, and the time of the second epoch's data as a share of the first's. One process, one
thread; the same conversations and the same tiny Qwen3-VL processor (patches of 16 pixels).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.rows.reader import PackedRows
from penstock.train.dataloader import Loader, LoaderConfig
from tests.media.pictures import picture
from tests.media.tiny_processors import load_processor, write_processor
from tests.stages.prepared import prepare, run, write_lines


def write_data(folder: Path, images: int, side: int) -> Path:
    """Conversations about one JPEG each."""
    folder.mkdir()
    records: list[dict[str, Any]] = []
    for number in range(images):
        name = f"{number}.jpg"
        (folder / name).write_bytes(picture(number, side, side, "JPEG", quality=85))
        question = [{"type": "image", "path": name}, {"type": "text", "text": "What is it?"}]
        answer = {"role": "assistant", "content": f"It is picture {number}."}
        records.append({"messages": [{"role": "user", "content": question}, answer]})
    return write_lines(folder / "data.jsonl", records)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    before = time.process_time()
    found = work()
    return time.process_time() - before, found


def as_a_collator_does(processor: Any, data: Path) -> int:
    """Tokens and tensors of each sample, from its conversation and its file."""
    tokens = 0
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"]
        part = messages[0]["content"][0]
        part["path"] = str(data.parent / part["path"])
        messages[1]["content"] = [{"type": "text", "text": messages[1]["content"]}]
        found = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, processor_kwargs={"return_tensors": "pt"}
        )
        tokens += found["input_ids"].shape[1]
    return tokens


def load_epoch(rows: PackedRows) -> int:
    """Images of all micro-batches of one row each."""
    reading = LoaderConfig(0, 2, pin_memory=False, pad_to_multiple_of=128, pad_to="own")
    steps = ([[index]] for index in range(len(rows)))
    return sum(len(b.images or ()) for step in Loader(rows, steps, reading) for b in step)


def main() -> None:
    """Print the ratios."""
    options = argparse.ArgumentParser()
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--side", type=int, default=256)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = write_processor("qwen3_vl", folder / "model")
        path = model / "preprocessor_config.json"
        size = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
        path.write_text(json.dumps({**json.loads(path.read_text()), "size": size}))
        data = write_data(folder / "data", asked.images, asked.side)
        loaded = load_processor(model)
        few = write_data(folder / "few", 2, asked.side)  # what is imported once is not measured
        as_a_collator_does(loaded.processor, few)
        run(prepare((few, {"type": "chat"}), tokenizer=str(model)), folder / "warm")
        theirs, tokens = seconds(lambda: as_a_collator_does(loaded.processor, data))
        stage = prepare((data, {"type": "chat"}), tokenizer=str(model))
        mine, (artifact, facts) = seconds(lambda: run(stage, folder / "prepared"))
        assert facts["tokens"]["train"] == tokens
        settings = PackSettings(sample_packing_sequence_len=4096)
        packing, _ = seconds(lambda: Pack(settings, artifact).run(folder / "packed"))
        rows = PackedRows(folder / "packed" / "data" / "train")
        first, images = seconds(lambda: load_epoch(rows))
        second, _ = seconds(lambda: load_epoch(rows))
        assert images == asked.images
    count = asked.images
    print(f"processor per sample: {count / theirs:8.1f} images per CPU second, every epoch")
    print(f"prepare             : {count / mine:8.1f} images per CPU second, once")
    print(f"                      {theirs / mine:8.2f} x")
    whole = mine + packing + first
    print(f"first epoch         : {whole:8.2f} s (prepare, pack, load)")
    print(f"second epoch        : {second:8.2f} s = {second / whole:.2%} of the first's")
    print(f"                      {theirs / second:8.1f} x faster than the processor's")


if __name__ == "__main__":
    main()
