"""`megatrain` and `python -m megatrain`: run a verb, and end with the exit code of its error."""

from __future__ import annotations

import sys
from contextlib import suppress

from megatrain.cli import app
from megatrain.errors import MegaTrainError


def main() -> None:
    """Run the command line. An error of ours prints as one message, without a traceback."""
    try:
        app(prog_name="megatrain")
    except MegaTrainError as error:
        with suppress(OSError):  # the terminal is gone: the exit code still tells
            print(f"{type(error).__name__} [{error.code}]: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
