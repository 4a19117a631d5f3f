"""Prompts that join a run between its passes: their completions are those they have alone."""

from dataclasses import replace

import pytest
import torch

from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.generation.run import NotFiniteError
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import Prompt
from tests.engine.generation.writing import built_of, job_of, told, write_model
from tests.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.dist]

ATOL = 1e-5
BEGINNING = list(range(40, 60))
PROMPTS = (
    Prompt([*BEGINNING, 5], SamplingParams(max_tokens=12, seed=1), num_completions=2),
    Prompt([*BEGINNING, 9, 8], SamplingParams(max_tokens=20, temperature=0), top_k=2),
    Prompt([7, 8, 9], SamplingParams(max_tokens=0), needs_prompt_logprobs=True, prompt_top_k=3),
    Prompt([301], SamplingParams(max_tokens=1, seed=4), num_completions=3),
    Prompt([*BEGINNING, *BEGINNING], SamplingParams(max_tokens=9, seed=2), prompt_top_k=1),
)
JOINS_AFTER = (0, 0, 3, 3, 9)
"""Passes before each prompt joins."""


def joined(job):
    """What each prompt is answered with the others, in the order in which they end; and alone."""
    generator = replace(built_of(job).generator, page_size=4, prefill_tokens=16)
    ranks = generator.ranks
    waiting = list(zip(JOINS_AFTER, PROMPTS, strict=True))
    requests, ended, passes = {}, [], 0
    with generator.run(PROMPTS) as run:
        has_arrivals = True
        while waiting or not run.is_finished:
            if has_arrivals:
                while waiting and waiting[0][0] <= passes:
                    assert run.has_room([waiting[0][1]])
                    requests[run.add([waiting.pop(0)[1]])] = len(requests)
            # Rank 0 alone knows of them.
            arrives = ranks.is_main_process and bool(waiting) and waiting[0][0] <= passes + 1
            finished, has_arrivals = run.step(has_arrivals=arrives)
            passes += 1
            ended += [(requests[request], told(request.outputs[0])) for request in finished]
    return ended, [told(generator.generate([prompt])[0]) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (2, {"data_parallel_mode": "ddp"}),
        (2, {"tensor_parallel_size": 2}),
    ],
    ids=["one rank", "replicas", "tensor parallel"],
)
def test_prompts_that_join_later_are_answered_as_alone(tmp_path, ranks, settings):
    write_model(tmp_path / "model")
    for ended, alone in on_ranks(ranks, joined, job_of(tmp_path, "run", **settings)):
        # The short ones do not wait for the long ones.
        assert ended[-1][0] == 1
        assert sorted(number for number, _ in ended) == [0, 1, 2, 3, 4]
        for number, answered in ended:
            expected = alone[number]
            assert answered["tokens"] == expected["tokens"]
            assert answered["ended"] == expected["ended"]
            for name in ("log_probs", "read", "theirs"):
                got, wanted = (torch.tensor(x[name] or []) for x in (answered, expected))
                torch.testing.assert_close(got, wanted, atol=ATOL, rtol=0, equal_nan=True)


def failing(job):
    """Requests of which one alone meets a token whose embedding is not finite."""
    built = built_of(job, init_process_group(60))
    prompts = [Prompt([5, 6], SamplingParams(max_tokens=6, temperature=0)), Prompt([7, 300, 9])]
    expected = told(built.generator.generate(prompts[:1])[0])
    [model] = built.engine.model.parts
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[300] = torch.nan
    with built.generator.run(prompts, weights_version="kept") as run:
        requests = [run.add([prompt]) for prompt in prompts]
        while not run.is_finished:
            run.step()
    [memory] = built.generator._memory
    left = [pool.count - pool.available for pool in memory.cache.pools.values()]
    good, bad = requests
    return expected, told(good.outputs[0]), type(bad.error), bad.outputs, left


def test_a_request_whose_logits_are_not_finite_fails_alone(tmp_path):
    write_model(tmp_path / "model", tie_word_embeddings=False)
    [(expected, answered, error, outputs, left)] = on_ranks(1, failing, job_of(tmp_path, "run"))
    assert answered["tokens"] == expected["tokens"]
    assert error is NotFiniteError
    assert not outputs
    assert left == [0]
