"""Only `Html` goes in as it stands; what cannot be seen is spelled out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain.report.markup import Html, escaped, tag
from megatrain.text import printable
from tests.report.reading import read


@given(st.text())
def test_any_text_comes_back_as_text(text: str) -> None:
    page = read(tag("p", text, title=text))
    assert page.tags == ["p"]
    assert page.text == printable(text)
    assert page.attributes == [("title", printable(text))]


def test_text_that_skips_escaping_would_be_noticed() -> None:
    assert read(tag("p", Html("<script>1</script>"))).tags == ["p", "script"]


def test_what_cannot_be_seen_is_spelled_out() -> None:
    assert escaped("\x1b[31m\u202ea\ud800\r") == r"\x1b[31m\u202ea\ud800\x0d"
    assert escaped("a\n\tb \u0645\u06cc\u200c\u062e") == "a\n\tb \u0645\u06cc\u200c\u062e"
