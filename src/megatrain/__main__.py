"""`megatrain` and `python -m megatrain`: run a command and exit with the code of its error."""

from __future__ import annotations

import errno
import sys

from megatrain.cli.app import app
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.output import lasting_output, say_last


def main() -> None:
    """Run the command line. A MegaTrain error prints as one message, without a traceback."""
    try:
        with lasting_output():
            _run()
    except MegaTrainError as error:
        say_last(f"{type(error).__name__} [{error.code}]: {error}")
        sys.exit(error.exit_code)


def _run() -> None:
    """Run the command; return if it succeeded, so that lost output can still be an error."""
    try:
        app(prog_name="megatrain")
    except SystemExit as ended:
        if ended.code:
            raise
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        raise ConfigError(
            f"{name[:60]}...: a path of {len(name):,} characters is too long."
        ) from None


if __name__ == "__main__":
    main()
