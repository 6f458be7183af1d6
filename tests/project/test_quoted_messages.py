"""The messages that the tables "message or symptom" quote are those of the source."""

import ast
import functools
import re

import pytest

from places import ROOT

# The rows below the header of a table whose first column quotes messages, or says a symptom.
TABLE = re.compile(r"^\| message or symptom \|.*\n((?:\|.*\n?)+)", re.MULTILINE)


@functools.cache
def messages():
    """All strings of the source except docstrings; a NUL is where an f-string puts a value."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and id(node) not in docstrings:
                found.append(str(node.value))
    return found


def is_quoted(piece):
    """Whether one message has these words; `...` is for what differs from call to call."""
    parts = piece.split("...")
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    # A search for what is nowhere in a text is quick.
    return any(pattern.search(text) for text in messages() if all(part in text for part in parts))


def quoted_by(page):
    """What stands in code font in the first column of a page's tables of messages."""
    tables = TABLE.findall(page.read_text(encoding="utf-8"))
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [piece for cell in cells for piece in re.findall(r"`([^`]+)`", cell)]


PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if quoted_by(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_messages_that_a_page_quotes_are_those_of_the_source(page):
    """The lie: a message that was worded differently since, which nobody can find in the table."""
    # One word alone, such as the name of an option, stands in some string by chance.
    found = quoted_by(page)
    assert [piece for piece in found if " " not in piece or not is_quoted(piece)] == []


def test_a_quoted_message_is_words_of_one_message():
    """The lie: words of two messages, of a docstring, or of nobody pass for a message."""
    assert is_quoted("devices=..., but this process has")
    assert not is_quoted("has no array to split ... the batches ran out")
    assert not is_quoted("Every error and warning that multitower raises")
    assert not is_quoted("the batches ran dry after step")


def test_tables_of_messages_are_found():
    """The lie: a table whose header is worded differently is read by no test."""
    assert len(PAGES) >= 14
    assert all("| symptom |" not in page.read_text(encoding="utf-8") for page in PAGES)
