"""A run's size is judged at its thresholds, and rows of unwritten length fit the data."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.loading.load import loads
from penstock.rows.row_length import SHORTEST, WANTED_ROWS, SampleSizes, fitted_row_length
from penstock.rows.sizing import RunSize, findings, run_size
from tests.config.values import smallest

GOOD = RunSize(
    steps=300,
    set_by="num_train_epochs",
    epochs=3,
    rows=400,
    rows_per_step=4,
    last_batch="drop",
    row_length=1024,
    longest=900,
    warmup_steps=10,
    samples=1000,
)


def names(**changes):
    return [each.name for each in findings(replace(GOOD, **changes))]


def test_nothing_is_said_of_a_run_of_usual_size():
    assert names() == []


@pytest.mark.parametrize(
    ("name", "beyond", "within"),
    [
        ("few_steps", {"steps": 19, "warmup_steps": 0}, {"steps": 20, "warmup_steps": 0}),
        ("long_rows", {"steps": 199, "longest": 64}, {"steps": 199, "longest": 65}),
        ("batch_over_epoch", {"rows_per_step": 401}, {"rows_per_step": 400}),
        ("rows_dropped", {"rows_per_step": 379}, {"rows_per_step": 380}),
        ("untrained_rows", {"packed_rows": 400, "untrained_rows": 1}, {"packed_rows": 400}),
        ("long_warmup", {"warmup_steps": 300}, {"warmup_steps": 299}),
        ("samples_cut", {"cut": 11}, {"cut": 10}),
        ("samples_too_long", {"too_long": 11}, {"too_long": 10}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_finding_begins_beyond_its_threshold(name, beyond, within):
    assert name in names(**beyond)
    assert name not in names(**within)


def test_a_share_of_truncated_samples_is_of_those_that_were_tokenized():
    prepared = {"rows": {"train": 8}, "truncated": 30, "dropped": {"max_samples": 92, "empty": 7}}
    packed = {"lengths": {"train": {}}, "rows": {"train": 8}}
    size = run_size(
        loads(smallest()), packed=packed, prepared=prepared, steps=2, set_by="", rows_per_step=4
    )
    [text] = [each.text for each in findings(size) if each.name == "samples_cut"]
    assert text.startswith("30 of 100 samples (30.0%) were truncated")


@pytest.mark.parametrize("set_by", ["max_steps", "max_tokens", "eval_only"])
def test_a_run_that_was_written_to_be_short_is_not_called_short(set_by):
    assert names(steps=1, set_by=set_by, warmup_steps=0) == []


def test_four_of_seven_rows_are_told_with_the_setting_that_keeps_them():
    size = replace(GOOD, rows=7, rows_per_step=4, steps=3, warmup_steps=0, row_length=2048)
    few, dropped = findings(size)
    assert "3 optimizer steps" in few.text
    assert "7 rows an epoch, 4 a step" in few.text
    assert "data.sample_packing_sequence_len (2,048" in few.text
    assert "3 of 7 rows (43%)" in dropped.text
    assert "data.dataloader_drop_last: false" in dropped.text
    assert [each.name for each in findings(replace(size, last_batch="drop_few"))] == ["few_steps"]


@given(
    longest=st.integers(0, 17).map(lambda power: 1 << power),
    tokens=st.integers(0, 1 << 40),
    most=st.integers(1, 64_000),
)
def test_a_fitted_row_holds_the_longest_sample_and_gives_enough_rows(longest, tokens, most):
    length = fitted_row_length(SampleSizes(longest, tokens), most)
    assert length <= most
    if length < most:
        assert length >= longest
        # No shorter row would have done.
        assert length in (SHORTEST, longest) or tokens < 2 * length * WANTED_ROWS
        if length > max(SHORTEST, longest):
            assert tokens >= length * WANTED_ROWS


@given(
    longest=st.integers(0, 17).map(lambda power: 1 << power),
    tokens=st.integers(0, 1 << 40),
    multiple=st.integers(1, 5_000),
)
def test_a_fitted_row_is_the_next_multiple_of_what_rows_are_padded_to(longest, tokens, multiple):
    most = 20 * multiple
    usual = fitted_row_length(SampleSizes(longest, tokens), 1 << 60)
    length = fitted_row_length(SampleSizes(longest, tokens), most, multiple)
    assert length % multiple == 0
    assert length == most or usual <= length < usual + multiple


@given(
    samples=st.integers(1, 100_000),
    mean=st.integers(1, 3_000),
    rows_per_step=st.integers(1, 64),
)
def test_a_step_of_fitted_rows_has_eight_samples_where_an_epoch_keeps_thirty_steps(
    samples, mean, rows_per_step
):
    tokens = samples * mean
    longest = 1 << (mean - 1).bit_length()
    sizes = SampleSizes(longest, tokens, samples)
    usual = fitted_row_length(sizes, 1 << 60)
    length = fitted_row_length(sizes, 1 << 60, rows_per_step=rows_per_step)
    assert length >= usual
    step = length * rows_per_step
    wanted = max(512, 8 * mean)
    if length > usual:
        assert tokens >= 30 * step
        assert length <= 4096
        assert step < wanted + SHORTEST * rows_per_step
    elif wanted < 4096 * rows_per_step:
        longer = (length + SHORTEST) * rows_per_step
        assert step >= wanted or tokens < 30 * longer
    assert fitted_row_length(SampleSizes(longest, 0, 0), 1 << 60, rows_per_step=8) >= longest


def test_three_hundred_short_chats_are_steps_of_eight():
    """The shape of a first own file: 300 chats of 72 tokens."""
    sizes = SampleSizes(128, 300 * 72, 300)
    assert fitted_row_length(sizes, 32_000) == 128
    assert fitted_row_length(sizes, 32_000, rows_per_step=1) == 640
    assert fitted_row_length(sizes, 32_000, rows_per_step=8) == 128
