"""Source lines: an equation is told with a line of the user's program, never with a library's."""

from types import SimpleNamespace

import pytest

from multitower.engines import source_lines
from multitower.errors import JAX


@pytest.mark.parametrize(
    "library",
    [
        "/usr/lib/python3/site-packages/jax/numpy.py",
        "/usr/lib/python3/dist-packages/jax/numpy.py",  # Debian's name for it, also on Colab
        source_lines.__file__,
        f"{JAX}_src/source_info_util.py",
        "/home/me/libraries/jax/numpy.py",  # by pip install --target
    ],
)
def test_the_line_is_the_users(library, monkeypatch):
    if "libraries" in library:
        monkeypatch.setattr(source_lines, "JAX", "/home/me/libraries/jax/")
    frame = lambda file, line: SimpleNamespace(file_name=file, line_num=line)
    user = source_lines.__file__.replace("multitower", "multitower_of_mine")
    frames = [frame(library, 1), frame(user, 30), frame("main.py", 2)]
    info = SimpleNamespace(traceback=SimpleNamespace(frames=frames))
    assert source_lines.line_of(SimpleNamespace(source_info=info)) == "source_lines.py:30"
