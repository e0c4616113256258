"""Text for users is plain English: no page and no module uses a phrase of docs/style.md.

`dialect` works on any text. Fenced blocks, inline code and the column `before` of a table are
quotations, so `prose` leaves them out of a page. Of a module, `written` takes strings, docstrings
and comments.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"))
)

MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("src/**/*.py"))
STYLE = (ROOT / "docs" / "style.md").read_text()

_BE = r"\b(?:is|are|was|were|be|been|being)"
_OWNERS = r"(?:its|their|our|your|my|his|her|one's)"
_NO_NOUN = (
    r"(?=$|[^\w\s]| (?:[^\w\s]|(?:that|which|is|are|was|were|has|have|can|may|will|would|in|on|at"
    r"|by|for|from|to|with|and|or|but|if|when|as|does|do|makes?|give)\b))"
)
_PLACES = r"(?:at|on|above|below|beside|between|behind|under|next|there|within|outside)"
BANNED = {
    rf"(?<!there ){_BE} no (?!longer\b|more than\b)": "is not a",
    rf"(?<!there ){_BE} (?-i:none)\b(?! of\b)": "is not one",
    rf"{_BE} (?:told|said)\b": "is reported, is printed",
    r"\b(?:go(?:es|ing|ne)?|went) on\b": "continues",
    rf"\bof {_OWNERS} own\b{_NO_NOUN}": "its own ...",
    r"\bof (?:ours|yours|theirs|somebody else)\b": "our, MegaTrain's",
    r"\bforet(?:ell|ells|old|elling)\b": "predict",
    r"\banew\b": "again",
    r"\bnobody's\b": "no ...",
    rf"\b(?:lies?|lay|stands?|stood) (?:{_PLACES}|in(?! for))\b": "is in, is on",
    r"\bst(?:ands|ood) still\b": "waits",
    r"\b(?:held|holds?|holding) (?:\S+ ){0,4}?against\b": "compare with",
    rf"{_BE} whole\b|\bwhole (?:checkpoint|model folder)s?\b|\bstays? whole\b": "complete",
    r"\b(?:can|cannot|could|to) be had\b": "is not possible",
    r"\bforeign (?:input|code|file|folder|data|manifest|text)s?\b": "untrusted",
    r"\b(?:gives?|gave|given|giving) back\b": "returns",
    r"\bpassed over\b": "skipped",
    r"\bin silence\b": "silently",
    r"\basked of\b": "taken from",
    r"\bwhat came\b|\bcame of\b": "the result",
    r"\bwhoever\b": "anyone who",
    r"\botherwise than\b": "differently from",
    r"\bfor ever\b": "never ends",
    r"\bin the place of\b": "instead of",
    r"\bmend(?:s|ed)?\b": "fix",
    r"\bway gone\b": "distance",
    r"\bturning back\b": "in order",
    r"\b(?:thereof|therein|wherein|whereof|hitherto|henceforth|hereby)\b": "ordinary words",
}  # fmt: skip
"""Phrases of the old dialect, as patterns, and what to write."""


def dialect(text: str) -> list[str]:
    """Return each banned phrase of a text, with its surroundings and what to write."""
    flat = " ".join(text.split())
    return [
        f"...{flat[max(match.start() - 30, 0) : match.end() + 30]}...: write '{better}'"
        for pattern, better in BANNED.items()
        for match in re.finditer(pattern, flat, re.I)
    ]


def prose(page: str) -> str:
    """Return a page's own words: not code, and not the column `before` of a table."""
    page = re.sub(r"^```.*?^```$|^ {4,}\S.*?$", "", page, flags=re.S | re.M)
    kept: list[str] = []
    quoted = -1
    for line in page.splitlines():
        cells = line.split("|")
        if not line.startswith("|"):
            quoted = -1
        elif quoted < 0:
            quoted = [cell.strip() for cell in [*cells, "before"]].index("before")
        kept.append("|".join(cell for number, cell in enumerate(cells) if number != quoted))
    return re.sub(r"`[^`]*`", "`code`", "\n".join(kept))


def written(source: str) -> str:
    """Return a module's own words: strings, docstrings and comments, without inline code."""
    found: list[str] = []
    joins = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            text = re.sub(r"^[rfbu]*(\"\"\"|\"|')|(\"\"\"|\"|')$", "", token.string, flags=re.I)
            found.append(text if joins else f"\n{text}")
            joins = True
        elif token.type == tokenize.COMMENT:
            found.append(f"\n{token.string}")
        elif token.type != tokenize.NL:
            joins = False
    return re.sub(r"`[^`\n]*`", "`code`", "".join(found))


def _examples() -> Iterator[tuple[str, str]]:
    for line in STYLE.split("| before | after |\n|---|---|\n")[1].splitlines():
        if not line.startswith("|"):
            return
        _, before, after, _ = line.split("|")
        yield before.strip(), after.strip()


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_plain_english(page: str) -> None:
    assert dialect(prose((ROOT / page).read_text())) == []


@pytest.mark.parametrize("module", MODULES)
def test_messages_and_docstrings_are_plain_english(module: str) -> None:
    assert [
        hit for part in written((ROOT / module).read_text()).split("\n\n") for hit in dialect(part)
    ] == []


def test_dialect_in_a_message_a_docstring_or_a_comment_would_be_noticed() -> None:
    source = (
        '"""A folder of its own."""\n'
        "raise DataError(\n    f'{path}: is '\n    'no file'\n)  # told anew\n"
        "is_no_name = 'plain'\n"
    )
    assert len(dialect(written(source))) == 3
    assert not dialect(written("is_no_name = 'plain'  # `is no name`\n"))


@pytest.mark.parametrize(("before", "after"), list(_examples()))
def test_the_examples_of_the_style_page_are_noticed(before: str, after: str) -> None:
    assert dialect(before)
    assert not dialect(after)


def test_every_banned_phrase_has_an_example() -> None:
    befores = "\n".join(before for before, _ in _examples())
    for pattern in BANNED:
        assert re.search(pattern, befores, re.I), pattern


@pytest.mark.parametrize(
    "text",
    [
        "There is no list of indices.",
        "The original folder is no longer needed.",
        "It is no more than 2 % slower.",
        "A line of dots stands for lines that are left out; stand-ins stand in for layers.",
        "None of the settings helps. Three of them are none of your concern.",
        "its own folder, none of our own templates, the norm of its own block",
    ],
)
def test_ordinary_english_passes(text: str) -> None:
    assert not dialect(text)


def test_quotations_are_left_out_and_nothing_else() -> None:
    page = (
        "| before | after |\n|---|---|\n| is no folder | is anew |\n\n"
        "`is no name` and\n```console\nis no faster\n```\nforetold\n"
    )
    assert len(dialect(page)) == 5
    assert len(dialect(prose(page))) == 2
