"""Megatron-LM's indexed datasets, written as the format is described, with struct alone."""

import struct
from pathlib import Path

FORMS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Codes of token types, and struct's letters for them."""


def write_mapped(prefix: Path, documents, code=4, modes=()) -> Path:
    """`documents` are lists of sequences of token ids, as the `MMIDIDX` form has them."""
    sequences = [sequence for document in documents for sequence in document]
    form = FORMS[code]
    with prefix.with_name(prefix.name + ".bin").open("wb") as data:
        for sequence in sequences:
            data.write(struct.pack(f"<{len(sequence)}{form}", *sequence))
    pointers, at = [], 0
    for sequence in sequences:
        pointers.append(at)
        at += len(sequence) * struct.calcsize(form)
    starts = starts_of(documents)
    with prefix.with_name(prefix.name + ".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code))
        index.write(struct.pack("<QQ", len(sequences), len(starts)))
        index.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        index.write(struct.pack(f"<{len(sequences)}q", *pointers))
        index.write(struct.pack(f"<{len(starts)}q", *starts))
        index.write(struct.pack(f"<{len(modes)}b", *modes))
    return prefix


def write_cached(prefix: Path, documents, code=4) -> Path:
    """The same in the older `TNTIDX` form."""
    sequences = [sequence for document in documents for sequence in document]
    form = FORMS[code]
    with prefix.with_name(prefix.name + ".bin").open("wb") as data:
        for sequence in sequences:
            data.write(struct.pack(f"<{len(sequence)}{form}", *sequence))
    offsets = [0]
    for sequence in sequences:
        offsets.append(offsets[-1] + len(sequence))
    starts = starts_of(documents)
    with prefix.with_name(prefix.name + ".idx").open("wb") as index:
        index.write(b"TNTIDX\x00\x00" + struct.pack("<QQQ", 1, code, struct.calcsize(form)))
        index.write(struct.pack("<QQQ", len(sequences), len(sequences), len(starts)))
        for numbers in (range(len(sequences) + 1), offsets, map(len, sequences), starts):
            for number in numbers:
                index.write(struct.pack("<q", number))
    return prefix


def starts_of(documents) -> list[int]:
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + len(document))
    return starts
