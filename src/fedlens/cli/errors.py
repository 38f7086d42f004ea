"""One clear sentence for everything that can go wrong, and the exit code that says whose turn it is."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class Explained(Exception):
    """What stopped a run has been said; the exit code is left."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def explain_error(error: BaseException, run: Path | None) -> int:
    """Say what happened, and how to go on with a run that had begun; anything else is a bug, and stays one."""
    from ..core.errors import BadInput, ClientFailed, RunFailed

    go_on = f"; go on with `fedlens resume {shlex.quote(str(run))}`" if run else ""
    if isinstance(error, BadInput):
        return complain(str(error), 2)
    if isinstance(error, ClientFailed):
        print(error.trace, file=sys.stderr)
    if isinstance(error, RunFailed):
        return complain(f"{error}{go_on}", 1)
    if isinstance(error, KeyboardInterrupt):
        return complain(f"stopped{', and the last checkpoint is kept' if run else ''}{go_on}", 130)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):
        return complain(f"there is not enough memory{go_on}", 1)
    if isinstance(error, OSError):
        return complain(f"{_trouble(error)}{go_on}", 1)
    if isinstance(error, UnicodeEncodeError):
        return complain(_unspeakable(error), 2)
    if hasattr(error, "format_message"):
        return _usage(error)
    raise error


def _trouble(error: OSError) -> str:
    place = f" at {Path(error.filename).parent}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full{place}, make room; what was saved is intact"
    if error.errno == errno.EPIPE:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain once more at its end
        return "nobody reads the output any more"
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def _unspeakable(error: UnicodeEncodeError) -> str:
    """Of a name of a file, say: what is in files is UTF-8 everywhere."""
    return f"{error.object!a} cannot be written in this locale's {error.encoding}; set PYTHONUTF8=1 or LC_ALL=C.UTF-8"


def _usage(error: Any) -> int:
    """What typer found wrong with the words themselves."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 0
    # typer and click both add the same suggestion.
    said = dict.fromkeys(error.format_message().replace("? ", "?\n").replace(". ", ".\n").splitlines())
    command = error.ctx.command_path if getattr(error, "ctx", None) else "fedlens"
    return complain(f"{' '.join(said)} See `{command} --help`.", 2)


def complain(sentence: str, code: int) -> int:
    """On one line, whatever signs a name in it has."""
    line = "".join(sign if sign.isprintable() else "?" for sign in " ".join(sentence.split()))
    red, end = ("\033[31m", "\033[0m") if _has_colours(sys.stderr) else ("", "")
    print(f"{red}fedlens:{end} {line}", file=sys.stderr)
    return code


def _has_colours(stream: TextIO) -> bool:
    """At a terminal that knows them, unless NO_COLOR says otherwise."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


@contextmanager
def notes() -> Iterator[None]:
    """What this package says about old names of settings, once, as a note in place of a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("once", category=FutureWarning, module="fedlens")
        show = warnings.showwarning

        def say(message: Any, category: Any, filename: str, *more: Any) -> None:
            if category is FutureWarning and "fedlens" in Path(filename).parts:
                print(f"note: {message}", file=sys.stderr)
            else:
                show(message, category, filename, *more)

        warnings.showwarning = say
        yield
