"""Where tests find what is no module: the checkout, its examples, the programs they start."""

import re
from pathlib import Path

PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parents[1]
EXAMPLES = ROOT / "examples"
CIRCLE = EXAMPLES / "own_recipe" / "recipe.py"


def text_of(page):
    """A page of the documentation, with the sections of README that it includes."""
    return re.sub(
        r'^--8<-- "README\.md:([\w-]+)"$',
        lambda match: section_of_readme(match[1]),
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )


def section_of_readme(name):
    """What stands between the two comments that mark it."""
    start, end = (f"<!-- --8<-- [{word}:{name}] -->\n" for word in ("start", "end"))
    return (ROOT / "README.md").read_text(encoding="utf-8").split(start)[1].split(end)[0].strip()
