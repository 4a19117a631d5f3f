"""How many held-out prompts an exported model answers exactly, asked through plain transformers.

Nothing of this project's own modelling code takes part: what is measured is what others will load.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from penstock.core.cache.stage import Artifact
from penstock.core.errors import StageError
from penstock.evaluate.folder import read_base_model
from penstock.rows.reader import map_batches
from penstock.rows.schema import IGNORED, PREPARED


@dataclass(frozen=True)
class Question:
    """A prompt and the answer the data gives to it, as token ids."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One question as text, and what became of it."""

    prompt: str
    answer: str
    expected: str
    right: bool


@dataclass(frozen=True)
class Report:
    """The share of questions answered exactly."""

    num_asked: int
    num_right: int
    num_skipped: int
    """Rows that ask nothing: their first token is trained already, or none is."""
    samples: tuple[Sample, ...]
    """Every question, in the order of the data."""

    @property
    def accuracy(self) -> float:
        """Between 0 and 1."""
        return self.num_right / self.num_asked


def exact_match(
    hf_folder: Path,
    prepared: Artifact,
    *,
    limit: int,
    seed: int,
    batch_size: int,
    answer: re.Pattern[str] | None = None,
) -> Report:
    """Ask the model in `hf_folder` up to `limit` rows of the validation split, chosen by `seed`.

    A prompt is what comes before the first trained token of a row, the expected answer is the run
    of trained tokens that starts there. Answers are generated greedily and compared token by token
    up to and including the end token. With `answer`, texts are compared, and of both only what its
    first group (without one, all of it) matches last; answers may then be twice as long as the
    expected ones, and rows whose own answer it does not match are skipped.

    Raises StageError when no row asks anything, CapabilityError when a package that loads the
    folder is not installed.
    """
    rows = _chosen_rows(prepared.path / "data" / "validation", limit, seed)
    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    found = [first_question(ids, labels) for ids, labels in rows]
    questions = [question for question in found if question is not None]
    if answer:
        questions = [q for q in questions if last_match(answer, _text(tokenizer, q.expected))]
    if not questions:
        such = f" that {answer.pattern} matches" if answer else ""
        raise StageError(
            f"{prepared.path} holds no validation row with a prompt and an answer{such} "
            f"({len(found)} rows looked at).\n  Set data.val_set_size or data.test_datasets."
        )
    model = _load_model(hf_folder)
    ends = _end_tokens(model, tokenizer)
    asking = _Asking(model, ends, tokenizer.pad_token_id or 0, room=2 if answer else 1)
    samples = [
        _judged(question, given, ends, tokenizer, answer)
        for question, given in zip(questions, asking.answers(questions, batch_size), strict=True)
    ]
    return Report(
        num_asked=len(questions),
        num_right=sum(sample.right for sample in samples),
        num_skipped=len(found) - len(questions),
        samples=tuple(samples),
    )


def last_match(answer: re.Pattern[str], text: str) -> str | None:
    """What the pattern's first group, or all of it, matches last; None where it matches nothing."""
    found = [match[1 if answer.groups else 0] for match in answer.finditer(text)]
    return found[-1].strip() if found and found[-1] is not None else None


def _judged(
    question: Question,
    given: tuple[int, ...],
    ends: frozenset[int],
    tokenizer: Any,
    answer: re.Pattern[str] | None,
) -> Sample:
    expected = _up_to_end(question.expected, ends)
    texts = _text(tokenizer, given), _text(tokenizer, expected)
    if answer:
        right = last_match(answer, texts[0]) == last_match(answer, texts[1])
    else:
        # An expected answer that was cut off has no end token, and is compared as far.
        right = given[: len(expected)] == expected
    return Sample(tokenizer.decode(question.prompt), *texts, right)


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


def first_question(input_ids: Sequence[int], labels: Sequence[int]) -> Question | None:
    """The first question a row asks; None when nothing precedes its trained tokens."""
    trained = [label != IGNORED for label in labels]
    if True not in trained[1:] or trained[0]:
        return None
    start = trained.index(True)
    end = trained.index(False, start) if False in trained[start:] else len(trained)
    return Question(tuple(input_ids[:start]), tuple(input_ids[start:end]))


def _chosen_rows(folder: Path, limit: int, seed: int) -> list[tuple[list[int], list[int]]]:
    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise StageError(
            f"{folder} holds no rows to ask.\n  Set data.val_set_size or data.test_datasets."
        )
    tables = [pa.Table.from_batches(map_batches(file), schema=PREPARED) for file in files]
    table = pa.concat_tables(tables).select(["input_ids", "labels"])
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(table))
    chosen = table.take(np.sort(order[:limit]))
    return list(zip(chosen["input_ids"].to_pylist(), chosen["labels"].to_pylist(), strict=True))


def _load_model(folder: Path) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = read_base_model(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(base or folder, dtype="auto")
    if base:
        from peft import PeftModel  # noqa: PLC0415 - an optional package

        model = PeftModel.from_pretrained(model, folder)
    return model.to(device).eval()


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    named = model.generation_config.eos_token_id
    ends = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    return frozenset(end for end in ends if end is not None)


@dataclass(frozen=True)
class _Asking:
    """How a model is asked."""

    model: Any
    ends: frozenset[int]
    pad: int
    room: int
    """How many times as long as the expected answer one may be."""

    def answers(self, questions: Sequence[Question], batch_size: int) -> list[tuple[int, ...]]:
        """The model's answer to each question, up to and including the first end token."""
        # Neighbours in length share a batch, so that little of it is padding.
        order = sorted(range(len(questions)), key=lambda index: len(questions[index].prompt))
        answers: list[tuple[int, ...]] = [()] * len(questions)
        for batch in _batches(order, batch_size):
            asked = [questions[index] for index in batch]
            for index, answer in zip(batch, self._generate(asked), strict=True):
                answers[index] = answer
        return answers

    @torch.no_grad()
    def _generate(self, asked: Sequence[Question]) -> list[tuple[int, ...]]:
        width = max(len(question.prompt) for question in asked)
        ids_BT = torch.full((len(asked), width), self.pad)
        mask_BT = torch.zeros_like(ids_BT)
        for row, question in enumerate(asked):
            ids_BT[row, width - len(question.prompt) :] = torch.tensor(question.prompt)
            mask_BT[row, width - len(question.prompt) :] = 1
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.room * max(len(question.expected) for question in asked),
            eos_token_id=sorted(self.ends) or None,
            pad_token_id=self.pad,
        )
        out_BT = self.model.generate(
            input_ids=ids_BT.to(self.model.device),
            attention_mask=mask_BT.to(self.model.device),
            generation_config=greedy,
        )
        return [_up_to_end(row, self.ends) for row in out_BT[:, width:].tolist()]


def _batches(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _up_to_end(tokens: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tuple(tokens[: index + 1])
    return tuple(tokens)
