"""The task: deterministic, exact, and never trained on what it is tested with."""

import pytest

from demo.task import MOST_HELD_OUT, MOST_TRAINED, Problem, problems, reward


def test_problems_follow_from_the_seed() -> None:
    assert problems(3, 6, "train") == problems(3, 6, "train")
    assert problems(3, 6, "train") != problems(4, 6, "train")


def test_held_out_problems_are_never_trained_on() -> None:
    trained, held_out = problems(0, MOST_TRAINED, "train"), problems(0, MOST_HELD_OUT, "held-out")
    assert len(set(trained)) == MOST_TRAINED
    assert len(set(held_out)) == MOST_HELD_OUT
    assert not set(trained) & set(held_out)


def test_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="not 500"):
        problems(0, 500, "train")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("8 + 7 = 15", 1.0),
        ("15", 1.0),
        ("15.", 1.0),
        ("8 + 7 = 16", 0.0),
        ("15 is not 16", 0.0),
        ("", 0.0),
        ("fifteen", 0.0),
        ("-15", 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_the_last_number_must_be_the_answer(completion: str, expected: float) -> None:
    assert reward(Problem(8, 7), completion) == expected
