"""Where tests find what is no module: the checkout, its examples, the programs they start."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parents[1]
EXAMPLES = ROOT / "examples"
CIRCLE = EXAMPLES / "own_recipe" / "recipe.py"
