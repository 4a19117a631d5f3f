"""Final answers are compared, where the expected completions have them."""

import pytest

from penstock.evaluate.final_answer import final_answers

GSM8K = ["She sells 9 eggs.\nShe makes 9 * 2 = <<9*2=18>>18.\n#### 18", "It is 1.\n#### 1,050"]
MATH = [r"So $x = \boxed{\frac{1}{2}}$.", r"We get $\boxed{7}$."]
LAST = ["First 3 and 4.\nTogether 7.", "Half of 10.\nSo it is $5.50"]


@pytest.mark.parametrize(
    ("expected", "given", "right"),
    [
        (GSM8K, "9 x 2 is 18\n#### 18", True),
        (GSM8K, "#### 18.00", True),
        (GSM8K, "The answer is $18.", True),
        (GSM8K, "It is 18, or 17", False),
        (GSM8K, "#### 17\nnot 18", False),
        (GSM8K, "", False),
        (MATH, r"\boxed{\frac{1}{2}}", True),
        (MATH, r"\boxed{ \frac{1} {2} }", True),
        (MATH, r"\boxed{\frac{1}{3}}", False),
        (MATH, r"\boxed{\frac{1}{2}", False),
        (LAST, "The sum:\n7", True),
        (LAST, "It is 7", True),
        (LAST, "It is 8", False),
    ],
)
def test_what_follows_the_reasoning_is_compared(expected, given, right):
    kind = final_answers(expected)
    assert kind
    assert kind.is_right(given, expected[0]) is right


def test_numbers_are_equal_however_they_are_written():
    kind = final_answers(GSM8K)
    assert kind
    assert kind.is_right("#### $1050.0", GSM8K[1])


def test_other_completions_are_compared_whole():
    assert final_answers([]) is None
    assert final_answers(["47 + 38 = 77 + 8 = 85"] * 9) is None
    assert final_answers(["It is sunny.\nTake a hat."] * 9) is None
    assert final_answers([*GSM8K, "no answer", "none"]) is None
