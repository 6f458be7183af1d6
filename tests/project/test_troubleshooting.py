"""The messages that the troubleshooting page quotes are those of the source."""

import ast
import functools
import re

from places import ROOT

PAGE = ROOT / "docs/guides/troubleshooting.md"


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
    pattern = re.compile(".*?".join(map(re.escape, piece.split("..."))), re.DOTALL)
    return any(pattern.search(text) for text in messages())


def test_messages_that_a_page_quotes_are_those_of_the_source():
    """The lie: a message that was worded differently since, which nobody can find in the table."""
    text = PAGE.read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    pieces = [piece for cell in cells for piece in re.findall(r"`([^`]+)`", cell)]
    assert len(pieces) >= 25
    assert [piece for piece in pieces if not is_quoted(piece)] == []
    # Neither the words of two messages, nor of a docstring, nor other words are one message.
    assert not is_quoted("has no array to split ... the batches ran out")
    assert not is_quoted("Every error and warning that multitower raises")
    assert not is_quoted("the batches ran dry after step")
