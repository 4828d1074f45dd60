"""The task: deterministic, exact, and never trained on what it is tested with."""

import pytest

from demo.task import Problem, problems, reward


def test_problems_follow_from_the_seed() -> None:
    assert problems(3, 50) == problems(3, 50)
    assert problems(3, 50) != problems(4, 50)


def test_held_out_problems_are_never_trained_on() -> None:
    assert not set(problems(0, 500)) & set(problems(0, 500, "held-out"))


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
