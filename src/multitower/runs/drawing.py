"""The libraries that draw reports: imported on first use, and optional."""

from collections.abc import Generator
from contextlib import contextmanager

from multitower.errors import RunError, install_command

_LIBRARIES = ("PIL", "jinja2", "markupsafe", "matplotlib")
_PACKAGES = ("jinja2", "matplotlib", "pillow")  # packages with these libraries


@contextmanager
def drawing_libraries(what: str) -> Generator[None]:
    """Turns a failed import inside the `with` block into an error that says what to install.

    Use it before the work that is to be reported.

    Args:
        what: what needs the libraries, for the message.

    Raises:
        RunError: a library that draws reports is not installed.

    Example:
        >>> from multitower.runs.drawing import drawing_libraries
        >>> with drawing_libraries("a report"):
        ...     from multitower.runs.report import write_report
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _LIBRARIES:
            raise
        raise RunError(
            f"{what} needs {library}, which is not installed. Run: {install_command(*_PACKAGES)}"
        ) from error
