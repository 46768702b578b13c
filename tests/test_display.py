"""The table of completions."""

from __future__ import annotations

import math

import pytest

from ppo_lora.display import completions_table, print_table


def _cells(prompts, completions, scores=None) -> list[list[str]]:
    """The text of each column."""
    table = completions_table(prompts, completions, scores or {}, "Step 3")
    return [[str(cell) for cell in column.cells] for column in table.columns]


def test_text_and_scores_stand_side_by_side():
    cells = _cells(["one", "two"], ["uno", "due"], {"score": [0.12345, -2.0], "length": [math.nan, 7]})
    assert cells == [["one", "two"], ["uno", "due"], ["0.123", "-2.000"], ["nan", "7.000"]]


def test_messages_have_their_role_in_front():
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    cells = _cells([prompt], [[{"role": "assistant", "content": "Hi"}]])
    assert cells == [["system: Be kind.\nuser: Hello"], ["assistant: Hi"]]


@pytest.mark.parametrize(("length", "shortened"), [(400, False), (401, True), (5000, True)])
def test_very_long_text_loses_its_middle(length, shortened):
    text = "a" * (length // 2) + "b" * (length - length // 2)
    (prompt,), _ = _cells([text], ["x"])
    assert prompt == ("a" * 200 + " ... " + "b" * 200 if shortened else text)


def test_square_brackets_are_text_and_not_markup(capsys):
    print_table(completions_table(["[bold]a[/bold]"], ["[/red]"], {"score": [1.0]}, "Step 3"))
    printed = capsys.readouterr().out
    for text in ("[bold]a[/bold]", "[/red]", "1.000", "Step 3", "prompt", "completion", "score"):
        assert text in printed


def test_no_rows_is_a_table_too():
    assert _cells([], [], {"score": []}) == [[], [], []]


def test_uneven_columns_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        completions_table(["one", "two"], ["uno"], {}, "Step 3")
