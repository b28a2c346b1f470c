"""Values that are taken out of text wherever they stand, by their marks."""

from __future__ import annotations

import pytest

from ncclops.redaction.marks import mark_of, marks_of, without_marked
from ncclops.redaction.redactor import redact_variables

VALUE = "correct.horse=battery"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "with {} at",
        "'{}'",
        "{{'PASSWORD': '{}'}}",
        "password={},",
        "https://me:{}@host/",
        "{};{}",
    ],
)
def test_a_marked_value_is_taken_out_with_what_is_around_it_left(text: str) -> None:
    found = without_marked(text.format(VALUE, VALUE), {mark_of(VALUE)}, lambda: "-")
    assert found == text.format("-", "-")


@pytest.mark.parametrize("text", [f"x{VALUE}", f"{VALUE}s", VALUE[:-1], "a path/of/some/length.py"])
def test_other_text_stays(text: str) -> None:
    assert without_marked(text, {mark_of(VALUE)}, lambda: "-") == text


def test_marks_are_of_secrets_alone_and_not_of_words() -> None:
    variables = {"MY_PASSWORD": VALUE, "OTHER_TOKEN": "no", "HOME": "/home/some/where"}
    assert marks_of(variables, redact_variables(variables)) == [mark_of(VALUE)]


def test_bytes_that_are_no_text_are_marked_like_all_others() -> None:
    value = "abc\udcff\udcfedefgh"  # as `os.environ` has it
    marks = marks_of({"DEPLOY_KEY": value}, redact_variables({"DEPLOY_KEY": value}))
    assert without_marked(f"with {value}, ab\ud800\udcffefghijk", marks, lambda: "-") == (
        "with -, ab\ud800\udcffefghijk"
    )


def test_a_value_is_taken_out_however_often_a_word_holds_it() -> None:
    word = ",".join([VALUE, "other"] * 20_000)
    found = without_marked(word, {mark_of(VALUE)}, lambda: "-")
    assert found == ",".join(["-", "other"] * 20_000)
