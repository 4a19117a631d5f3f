"""Drawing tokens: by the probabilities that are asked for, from one number each."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.core.errors import ConfigError
from penstock.engine.generation.sampling import SamplingParams, sample_token, uniform
from penstock.engine.generation.sequences import Prompt
from tests.engine.generation.writing import (
    built_of,
    job_of,
    log_probs_after,
    read_model,
    write_model,
)

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.9, float("-inf"), 0.0, 0.31])
DRAWS = 20_000
# A right sampler is refused with one seed in a thousand; these are fixed.
CHANCE = 1e-3
KOLMOGOROV = 1.95
"""What the square root of the count times the greatest distance of two distributions exceeds with
that chance."""


def chance_of_more(counts, wanted):
    """Of a chi-square as large as this, where counts come of these probabilities."""
    expected = wanted * counts.sum()
    distance = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance / 2))


def drawn(how, logits=LOGITS, draws=DRAWS):
    """How often each token is drawn."""
    uniforms = [uniform(5, 0, place) for place in range(draws)]
    tokens, log_probs = sample_token(logits.expand(draws, -1), [how] * draws, uniforms)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[tokens])
    return torch.bincount(tokens, minlength=len(logits))


WARPED = {
    "as they are": (SamplingParams(), []),
    "hotter": (SamplingParams(temperature=1.7), [TemperatureLogitsWarper(1.7)]),
    "colder": (SamplingParams(temperature=0.4), [TemperatureLogitsWarper(0.4)]),
    "the best three": (SamplingParams(top_k=3), [TopKLogitsWarper(3)]),
    "more than there are": (SamplingParams(top_k=70), []),
    "the likeliest": (SamplingParams(top_p=0.7), [TopPLogitsWarper(0.7)]),
    "all at once": (
        SamplingParams(temperature=1.5, top_k=4, top_p=0.8),
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(4), TopPLogitsWarper(0.8)],
    ),
}


@pytest.mark.parametrize(("how", "warpers"), WARPED.values(), ids=WARPED)
def test_tokens_are_drawn_as_often_as_transformers_would_have_them(how, warpers):
    scores = LOGITS[None]
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    wanted = scores[0].double().softmax(-1)
    counts = drawn(how)
    assert (counts[wanted == 0] == 0).all()
    possible = wanted > 0
    assert chance_of_more(counts[possible], wanted[possible]) > CHANCE


def test_rows_are_drawn_each_as_it_is_asked():
    hows = [how for how, _ in WARPED.values()] + [SamplingParams(temperature=0)]
    torch.manual_seed(0)
    logits = torch.randn(len(hows), 50)
    uniforms = [uniform(1, row, 0) for row in range(len(hows))]
    together, _ = sample_token(logits, hows, uniforms)
    alone = [
        int(sample_token(logits[row : row + 1], [how], [uniforms[row]])[0])
        for row, how in enumerate(hows)
    ]
    assert together.tolist() == alone


def test_without_temperature_the_likeliest_is_drawn_and_of_equals_the_lowest():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, -1.0, 1.0]])
    tokens, _ = sample_token(logits, [SamplingParams(temperature=0)] * 2, [0.9, 0.9])
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-39, 1e-300])
def test_however_cold_it_is_a_token_that_is_likeliest_is_drawn(temperature):
    logits = torch.tensor([[-300.0, 80.0, 79.0, float("-inf")], [5.0, 2.0, -1.0, 4.0]])
    tokens, log_probs = sample_token(
        logits, [SamplingParams(temperature=temperature)] * 2, [0.999, 0.0]
    )
    assert tokens.tolist() == [1, 0]
    assert log_probs.isfinite().all()


def test_however_hot_it_is_what_is_impossible_is_not_drawn():
    counts = drawn(SamplingParams(temperature=1e300))
    possible = LOGITS.isfinite()
    assert (counts[~possible] == 0).all()
    assert chance_of_more(counts[possible], torch.full((6,), 1 / 6)) > CHANCE


def test_a_row_that_is_no_numbers_leaves_the_others_as_they_are():
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    hows = [SamplingParams(), SamplingParams(top_k=5, top_p=0.9), SamplingParams(temperature=0)]
    wanted, _ = sample_token(logits, hows, [0.3, 0.6, 0.9])
    for row in range(3):
        flawed = logits.clone()
        flawed[row] = float("nan")
        tokens, _ = sample_token(flawed, hows, [0.3, 0.6, 0.9])
        others = [number for number in range(3) if number != row]
        assert torch.equal(tokens[others], wanted[others])
        assert 0 <= tokens[row] < 50


def test_the_greatest_number_draws_a_token_that_can_be_drawn():
    logits = torch.tensor([[0.0, 1.0, float("-inf"), float("-inf")]])
    tokens, _ = sample_token(logits, [SamplingParams()], [1 - 2**-53])
    assert tokens.tolist() == [1]


def test_logits_that_differ_by_rounding_draw_the_same():
    torch.manual_seed(0)
    logits = torch.randn(500, 1000)
    uniforms = [uniform(3, 1, place) for place in range(500)]
    other = logits + 1e-7 * torch.randn_like(logits)
    how = [SamplingParams()] * 500
    assert torch.equal(
        sample_token(logits, how, uniforms)[0], sample_token(other, how, uniforms)[0]
    )


def test_numbers_are_uniform_over_places_samples_and_seeds():
    for numbers in (
        [uniform(7, 0, place) for place in range(5000)],
        [uniform(7, sample, 3) for sample in range(5000)],
        [uniform(seed, 0, 3) for seed in range(5000)],
    ):
        assert len(set(numbers)) == 5000
        ordered = torch.tensor(numbers, dtype=torch.float64).sort().values
        steps = torch.arange(5001, dtype=torch.float64) / 5000
        apart = torch.maximum(ordered - steps[:-1], steps[1:] - ordered).max()
        assert 5000**0.5 * apart < KOLMOGOROV


def test_each_answer_is_drawn_by_numbers_of_its_own_and_ends_where_the_context_does(tmp_path):
    write_model(tmp_path / "model", max_position_embeddings=16)
    asked = [5, 6, 7, 8]
    built = built_of(job_of(tmp_path, "drawn"))
    prompts = [
        Prompt(asked, SamplingParams(max_tokens=most, seed=9), num_completions=3)
        for most in (100, 12, 5, None)
    ]
    found = [
        [completion.tokens for completion in output.completions]
        for output in built.generator.generate(prompts)
    ]
    assert [[len(tokens) for tokens in each] for each in found] == [
        [n] * 3 for n in (12, 12, 5, 12)
    ]
    assert found[0] == found[1] == found[3]
    assert found[2] == [tokens[:5] for tokens in found[0]]
    model = read_model(tmp_path / "model")
    for sample, tokens in enumerate(found[0]):
        shares = log_probs_after(model, [*asked, *tokens])[len(asked) - 1 : -1].double().exp()
        below = shares.cumsum(-1) / shares.sum(-1, keepdim=True)
        wanted = [
            int((sums <= uniform(9, sample, place)).sum()) for place, sums in enumerate(below)
        ]
        assert tokens == wanted


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"stop_texts": ("",)}, "stop text"),
    ],
)
def test_what_says_nothing_is_refused(written, named):
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**written)
