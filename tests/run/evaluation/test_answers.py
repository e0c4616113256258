"""Laws of answers.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatrain.errors import DataError
from megatrain.run.evaluation.answers import Question, judge, question_groups, questions

END = 1
ENDS = frozenset({END})


class Rows:
    """Documents given as tokens; the trained ones are negative."""

    def __init__(self, *rows: list[int]) -> None:
        self.rows = rows
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.row_starts = np.arange(len(rows) + 1, dtype=np.int64)

    def tokens(self, document: int) -> tuple[Any, Any]:
        row = np.array(self.rows[document], dtype=np.int32)
        return abs(row), row < 0


def decode(tokens: list[int]) -> str:
    return "".join(chr(96 + token) for token in tokens if token != END)


def question(prompt: list[int], answer: list[int]) -> Question:
    return Question(prompt=tuple(prompt), answer=tuple(answer))


def test_each_stretch_of_trained_tokens_is_an_answer() -> None:
    rows = Rows([5, 6, -7, -END, 8, -9, -END], [5, -6])
    assert questions(rows) == [
        question([5, 6], [7, END]),
        question([5, 6, 7, END, 8], [9, END]),
        question([5], [6]),
    ]
    assert len(questions(rows, max_rows=1)) == 2


def test_rows_without_a_prompt_are_refused() -> None:
    with pytest.raises(DataError, match=r"^no row has a prompt followed by an answer"):
        questions(Rows([-5, -6, -7], [3, 4]))


@pytest.mark.parametrize(
    ("expected", "made", "exact"),
    [
        ([5, 6, END], [5, 6, END], True),
        ([5, 6, END], [5, 7, END], False),
        ([5, 6, END], [5, END], False),
        ([5, 6, END], [5, 6, 7], False),
        ([5, 6, END], [5, 6], False),  # the text is the same, but it does not end
        ([5, 6, END, 4], [5, 6, END], True),  # a template may write on after the end
        ([5, 6], [5, 6, 7, 8], True),  # a row that was cut has no end to be held against
        ([5, 6], [5, END], False),
    ],
)
def test_exact_is_the_same_text_and_the_same_end(
    expected: list[int], made: list[int], exact: bool
) -> None:
    assert (judge(question([3], expected), made, ENDS, decode) is None) == exact


@pytest.mark.parametrize(
    ("expected", "written", "exact"),
    [
        ("<think>\nfour?\n</think>\n\n4", "<think>\n2 and 2\n</think>\n\n4", True),
        ("<think>\n\n</think>\n\n4", "4", True),
        ("4", "it is 2 + 2\n</think>\n\n4", True),  # the prompt had opened the thought
        ("<think>\n4\n</think>\n\n4", "<think>\n4\n</think>\n\n5", False),
        ("4", "<think>\n4", False),  # it never came to an answer
    ],
)
def test_what_is_thought_before_an_answer_is_not_judged(
    expected: str, written: str, exact: bool
) -> None:
    texts = {(5, END): expected, (6, END): written, (3,): "2 + 2"}
    found = judge(question([3], [5, END]), [6, END], ENDS, lambda tokens: texts[tuple(tokens)])
    assert (found is None) == exact


@pytest.mark.parametrize("most_tokens", [1, 12, 1000])
def test_every_question_is_in_one_group_that_is_small_enough(most_tokens: int) -> None:
    asked = [question([3] * size, [4]) for size in (2, 9, 3, 5, 2, 7)]
    made = list(question_groups(asked, most_tokens))
    assert sorted(number for group in made for number in group) == list(range(6))
    for group in made:
        longest = max(len(asked[number].prompt) + 1 for number in group)
        assert len(group) == 1 or len(group) * longest <= most_tokens
