"""Options of recipes: every word means what it says, or is an error that lists what there is."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal, Optional

import pytest

import multitower as mt
from multitower.recipes.catalog import SHIPPED, find_recipe, option_names
from multitower.recipes.options import as_json, make_options


@dataclasses.dataclass(frozen=True)
class Options:
    rate: Annotated[float, "learning rate"] = 0.5
    count: int = 3
    wide: bool = False
    where: Path | None = None
    word: str = "a"
    maybe: float | None = None
    older: Optional[int] = None  # noqa: UP045 (as many programs write it)
    mode: Literal["a", "b"] | None = "a"
    sizes: tuple[int, ...] = (8, 4)


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("rate", "1e-3", 1e-3),
        ("rate", "2", 2.0),
        ("count", "-7", -7),
        ("wide", "true", True),
        ("wide", "No", False),
        ("where", "/x/y", Path("/x/y")),
        ("where", "none", None),
        ("word", "true", "true"),
        ("maybe", "None", None),
        ("maybe", "4", 4.0),
        ("older", "4", 4),
        ("older", "none", None),
    ],
)
def test_words_become_values(name, word, value):
    found = getattr(make_options(Options, {name: word}, "mine"), name)
    assert found == value
    assert type(found) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": "fast"}, "rate=fast: this option of mine is a number"),
        ({"count": "1.5"}, "count=1.5: this option of mine is a whole number"),
        ({"wide": "2"}, "wide=2: this option of mine is true or false"),
        ({"maybe": "x"}, "maybe=x: this option of mine is a number or none"),
        # The lie: "b is not a Literal".
        ({"mode": "b"}, "mode=b: the field mode of the options of mine has a type that no word"),
        ({"sizes": "1,2"}, "sizes=1,2: .* Give it the type bool, int, float, str or Path, or"),
        (
            {"rat": "1"},
            r"no option 'rat'. Did you mean 'rate'\? There are: rate=0.5 \(learning rate\); co",
        ),
    ],
)
def test_words_that_do_not_fit_are_errors(settings, message):
    with pytest.raises(mt.RunError, match=message):
        make_options(Options, settings, "mine")


def test_a_recipe_without_options_has_none():
    assert make_options(None, {}, "mine") is None
    assert as_json(None) == {}
    with pytest.raises(mt.RunError, match=r"has no option 'x'. It has none"):
        make_options(None, {"x": "1"}, "mine")


def test_options_are_told_as_json():
    assert as_json(Options(where=Path("/x")))["where"] == "/x"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_tells_what_was_set(name):
    assert set(find_recipe(name).options) == set(option_names(name))


def test_what_options_say_of_themselves_is_an_error_in_one_line():
    @dataclasses.dataclass(frozen=True)
    class Checked:
        rate: float = 1.0

        def __post_init__(self):
            if self.rate > 5:
                raise ValueError("the rate is too high")

    assert make_options(Checked, {"rate": "5"}, "mine").rate == 5
    with pytest.raises(mt.RunError, match="mine refuses its options: the rate is too high"):
        make_options(Checked, {"rate": "6"}, "mine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    rate: float
    words: str = dataclasses.field(default_factory=lambda: "made")
    half: float = dataclasses.field(init=False, default=0.5)


def test_fields_that_are_computed_and_have_no_plain_default():
    assert make_options(Computed, {"rate": "2"}, "mine") == Computed(rate=2.0)
    with pytest.raises(mt.RunError, match="needs a value for its option 'rate'"):
        make_options(Computed, {}, "mine")
    with pytest.raises(mt.RunError, match=r"no option 'half'.* rate=VALUE; words=made\.$"):
        make_options(Computed, {"half": "2"}, "mine")
