"""Text and tokenizers for the benchmarks, made from nothing but what every installation has.

The words are those of this repository's and of Python's own documentation and code, in random
order, so that they have the lengths, cases and symbols of real ones.
"""

import json
import random
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from tests.stages.prepare.encoding import CHATML, PATTERN

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 32_000


def lines() -> list[str]:
    """Lines of real text and code, a few million characters."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    files += sorted(library.glob("*.py"))
    return [
        line
        for path in files
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines()
        if len(line) > 20
    ]


def documents(count: int, characters: int, seed: int = 0) -> list[str]:
    """Texts of about so many characters: lines in random order, some words exchanged."""
    draw = random.Random(seed)
    found = lines()
    words = " ".join(found).split()
    texts: list[str] = []
    for _ in range(count):
        wanted = int(draw.lognormvariate(0, 0.6) * characters / 1.2)
        parts: list[str] = []
        while wanted > 0:
            line = draw.choice(found).split(" ")
            line[draw.randrange(len(line))] = draw.choice(words)
            parts.append(" ".join(line))
            wanted -= len(parts[-1]) + 1
        texts.append("\n".join(parts) or "one")
    return texts


def write_lines(path: Path, records: list[Any]) -> None:
    """Records as lines of JSON."""
    with path.open("w", encoding="utf-8") as sink:
        sink.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def save_tokenizer(folder: Path, template: str = CHATML) -> None:
    """A byte-level BPE tokenizer of 32k tokens, learnt from the same lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
