"""The KV cache between calls: the turns of a conversation are computed once."""

from dataclasses import replace

import pytest

from penstock.engine.build import BuiltModel
from penstock.engine.generation.run import GenerationRun
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import GenerationOutput, Prompt
from tests.engine.generation.test_generation import ATOL, FAMILIES
from tests.engine.generation.writing import built_of, job_of, write_model

PAGE = 4


@pytest.fixture(scope="module", params=["model", "windows", "latent attention"])
def built(request, tmp_path_factory) -> BuiltModel:
    folder = tmp_path_factory.mktemp(request.param.split()[0])
    write_model(folder / "model", **FAMILIES[request.param])
    return built_of(job_of(folder, "run"))


class Conversation:
    """Turns of a conversation, and how many tokens each pass of the model has computed."""

    def __init__(self, built: BuiltModel, monkeypatch) -> None:
        self.generator = replace(built.generator, page_size=PAGE)
        self.computed: list[int] = []
        forward = GenerationRun._forward

        def counting(run, batch, samples):
            self.computed.append(batch.batch.num_tokens)
            forward(run, batch, samples)

        monkeypatch.setattr(GenerationRun, "_forward", counting)

    def answer(self, tokens: list[int], version: str | None) -> GenerationOutput:
        self.computed.clear()
        sampling = SamplingParams(max_tokens=6, temperature=0)
        [output] = self.generator.generate([Prompt(tokens, sampling)], weights_version=version)
        return output


def test_a_turn_computes_only_what_the_turns_before_it_did_not(built, monkeypatch):
    conversation = Conversation(built, monkeypatch)
    tokens = list(range(20, 63))
    for _ in range(3):
        expected = conversation.answer(tokens, None)
        assert sum(conversation.computed) == len(tokens) + 5
        answered = conversation.answer(tokens, "first weights")
        [mine], [wanted] = answered.completions, expected.completions
        assert mine.tokens == wanted.tokens
        assert mine.log_probs == pytest.approx(wanted.log_probs, abs=ATOL)
        previous = len(tokens) + 5
        tokens = [*tokens, *mine.tokens, 7, 8, 9, 10, 11]
        conversation.answer(tokens, "first weights")
        # Whole pages alone are shared.
        assert sum(conversation.computed) <= len(tokens) + 5 - previous // PAGE * PAGE
        # Others see nothing of it.
        conversation.answer(tokens, "other weights")
        assert sum(conversation.computed) == len(tokens) + 5
        conversation.generator.release_cache()
        conversation.answer(tokens, "first weights")
        assert sum(conversation.computed) == len(tokens) + 5


def test_a_call_that_raises_leaves_no_pages_behind(built, monkeypatch):
    conversation = Conversation(built, monkeypatch)
    tokens = list(range(20, 63))
    conversation.answer(tokens, "weights")
    [memory] = conversation.generator._memory
    calls = iter(range(3))

    def stop() -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.generator.generate([Prompt(tokens)], between=stop, weights_version="weights")
    assert not conversation.generator._memory
    conversation.answer(tokens, "weights")
    assert conversation.generator._memory[0] is not memory
    for pool in conversation.generator._memory[0].cache.pools.values():
        assert pool.available == pool.count


def test_a_longer_sequence_than_the_kept_cache_can_hold_gets_another(built, monkeypatch):
    monkeypatch.setattr("penstock.engine.generation.generator.KEPT_TOKENS", 0)
    conversation = Conversation(built, monkeypatch)
    conversation.answer([5], "weights")
    [memory] = conversation.generator._memory
    conversation.answer(list(range(20, 100)), "weights")
    assert conversation.generator._memory[0].max_length >= 86 > memory.max_length


def test_nothing_is_kept_without_a_version(built, monkeypatch):
    conversation = Conversation(built, monkeypatch)
    conversation.answer([5, 6], None)
    assert not conversation.generator._memory
