"""Where what a model writes ends: at what stops it, where nobody wants it any more, or before it
begins."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.generation.run import NotFiniteError
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import DecodingSequence, Prompt
from penstock.rows.tokenizer import byte_tokenizer
from tests.engine import runs
from tests.engine.generation.writing import built_of, job_of, write_model, written
from tests.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.dist]

PROMPTS = ([5, 6, 7, 8, 9], [301], list(range(40, 77)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endings")
    write_model(folder / "model")
    return folder


def stopped(job):
    """Answers that would go on for long, and what ends them."""
    built = built_of(job)
    free = Prompt(PROMPTS[0], SamplingParams(max_tokens=100, seed=9), num_completions=4)
    [plain] = written(built, [free])
    tokens = sorted({token for some in plain["tokens"] for token in some[5:9]})[:3]
    decode = byte_tokenizer().decode
    text = decode(plain["tokens"][0][20:22])
    by_token, by_text, at_limit, none = written(
        built,
        [
            replace(free, sampling=replace(free.sampling, stop_tokens=tuple(tokens))),
            replace(free, sampling=replace(free.sampling, stop_texts=("never said", text))),
            Prompt(list(range(30)) * 16, SamplingParams(seed=1)),
            Prompt(PROMPTS[2], SamplingParams(max_tokens=0), needs_prompt_logprobs=True),
        ],
    )
    return plain, tokens, by_token, text, by_text, at_limit, none


def test_answers_end_at_stop_tokens_at_stop_texts_and_where_the_context_does(folder):
    [found] = on_ranks(1, stopped, job_of(folder, "stops"))
    plain, tokens, by_token, text, by_text, at_limit, none = found
    for whole, got, ended in zip(
        plain["tokens"], by_token["tokens"], by_token["ended"], strict=True
    ):
        first = min((whole.index(token) for token in tokens if token in whole), default=None)
        assert got == (whole if first is None else whole[: first + 1])
        assert ended == ("length" if first is None else "stop")
    assert by_token["ended"].count("stop") >= 1
    decode = byte_tokenizer().decode
    for whole, got, ended in zip(plain["tokens"], by_text["tokens"], by_text["ended"], strict=True):
        ends = [end for end in range(1, 101) if text in decode(whole[:end])]
        assert got == whole[: ends[0] if ends else 100]
        assert ended == ("stop" if ends else "length")
    assert by_text["ended"][0] == "stop"
    assert len(at_limit["tokens"][0]) == runs.TINY["max_position_embeddings"] - 480
    assert at_limit["ended"] == ["length"]
    assert none["tokens"] == [[]]
    assert none["ended"] == ["length"]
    assert len(none["read"]) == len(PROMPTS[2])


def test_a_stop_text_is_found_where_each_of_its_bytes_is_a_token():
    text = "停止写作吧"
    tokenizer: Any = byte_tokenizer()
    prompt = Prompt([1], SamplingParams(stop_texts=("!", text)))
    sequence = DecodingSequence(0, 0, prompt, 0, max_tokens=100, seed=0)
    tokens = tokenizer.encode(f"ab{text}", add_special_tokens=False)
    assert len(tokens) == 2 + len(text.encode())
    for token in tokens:
        assert sequence.finish_reason is None
        sequence.append(token, 0.0, tokenizer.decode)
    assert sequence.finish_reason == "stop"


REFUSED = {
    "no token": Prompt([]),
    "prompt 0 has 512 tokens, and the model's context ends at 512": Prompt([1] * 512),
    "token 320, and the model's vocabulary ends at 319": Prompt([3, 320]),
    "0 completions are requested": Prompt([1], num_completions=0),
    "the top 400 tokens": Prompt([1], prompt_top_k=400),
    "the top 321 tokens": Prompt([1], top_k=321),
    "no tokenizer": Prompt([1], SamplingParams(stop_texts=(".",))),
}


def refused(job):
    built = built_of(job, init_process_group(60))
    found = {}
    for fault, prompt in REFUSED.items():
        with pytest.raises(ConfigError) as error:
            built.generator.generate([prompt])
        found[fault] = str(error.value)
    [model] = built.engine.model.parts
    read = Prompt([1, 2, 3], SamplingParams(max_tokens=1), needs_prompt_logprobs=True)
    with pytest.raises(NotFiniteError):
        replace(built.generator, logits=endless_within(built.generator.logits)).generate([read])
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(NotFiniteError):
        built.generator.generate(
            [Prompt([1, 2], SamplingParams(max_tokens=3), needs_prompt_logprobs=True)]
        )
    return found


def endless_within(logits):
    """Logits that are infinite where a prompt is read, and numbers where an answer is drawn."""

    def found(hidden, head, places):
        for some, logits_CV in logits(hidden, head, places):
            if len(places) > 1:
                logits_CV[0, 0] = torch.inf
            yield some, logits_CV

    return found


class CalledOffError(Exception):
    """Somebody wants no answers any more."""


def called_off(job):
    """What is written before and after; and how the model was when it was asked, and then is."""
    built, passes = built_of(job), []
    asked = [Prompt(ids, SamplingParams(max_tokens=9, seed=1)) for ids in PROMPTS]
    before = written(built, asked)

    def go_on():
        passes.append(built.engine.model.parts[0].training)
        if len(passes) == 3:
            raise CalledOffError

    with pytest.raises(CalledOffError):
        built.generator.generate(asked, between=go_on)
    trains = built.engine.model.parts[0].training
    return before, written(built, asked), passes, trains


def test_writing_ends_between_passes_where_it_is_called_off(folder):
    [(before, after, passes, trains)] = on_ranks(1, called_off, job_of(folder, "called off"))
    assert passes == [False] * 3
    assert trains
    assert after == before


def test_what_cannot_be_answered_is_refused(folder):
    [found] = on_ranks(1, refused, job_of(folder, "refused"))
    for fault, said in found.items():
        assert fault in said
