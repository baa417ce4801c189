"""The entry point: runs a command and turns what it raises into a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SIGINT_EXIT_CODE = 130


def main(args: Sequence[str] | None = None) -> int:
    """Runs `raytrainer ARGS` and returns the exit code: 0, the error's own, 2 for usage, 130 for Ctrl-C.

    An exception that raytrainer does not raise on purpose is a fault of its own and keeps its traceback.
    """
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return SIGINT_EXIT_CODE


def _run(args: Sequence[str] | None) -> int:
    # Imported here, where a Ctrl-C that comes while they load is answered too.
    import typer

    from raytrainer.cli import app
    from raytrainer.errors import RaytrainerError, show_warnings_in_one_line

    show_warnings_in_one_line()
    try:
        result = app(args=None if args is None else list(args), prog_name="raytrainer", standalone_mode=False)
        sys.stdout.flush()
    except RaytrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except typer.Abort:
        return SIGINT_EXIT_CODE
    except BrokenPipeError:
        # The reader has gone (`raytrainer schema | head`): nothing more is written, not at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        error.show()  # the command line's own usage errors, whose class is private to typer
        return error.exit_code
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
