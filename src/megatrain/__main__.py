"""`megatrain` and `python -m megatrain`: run a command and exit with the code of its error."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain.cli.app import app
from megatrain.errors import ConfigError, DataError, MegaTrainError, Notice, RankLost
from megatrain.output import lasting_output, say_last
from megatrain.ranks.launcher import end_with_launcher, read_environment, record


def main() -> None:
    """Run the command line. A MegaTrain error prints as one message, without a traceback.

    Rank 0 of several prints; torch's agent shows the errors of all. Without an agent each rank
    prints its own.
    """
    rank = 0
    end_with_launcher()
    if "torch" not in sys.modules:
        let_threads_sleep(os.environ)
    try:
        owner = read_environment(os.environ)
        rank = 0 if owner is None else owner.rank
        with lasting_output(f"rank {rank}: " if rank else None):
            show_notices(leads=rank == 0)
            _run()
    except MegaTrainError as error:
        if not record(error) or rank == 0:
            say_last(f"{type(error).__name__} [{error.code}]: {error}")
        if isinstance(error, RankLost):  # threads may wait for that rank in the backend for good
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    except Exception as error:
        record(error)
        raise


def show_notices(*, leads: bool) -> None:
    """Print a Notice as its text alone, on the rank that leads; other warnings stay as they are."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, Notice):
            usual(message, category, *place, **more)
        elif leads:
            print(message, file=sys.stderr)

    warnings.showwarning = show


def let_threads_sleep(environ: MutableMapping[str, str], devices: Path = Path("/dev")) -> None:
    """Let threads of OpenMP that wait give up their core, where a processor computes.

    By default they spin, and on a busy machine the thread they wait for then has no core: a step of
    torch took 2.3 s instead of 0.46 s at a load of 17 on two cores, and as long as before where
    nothing else ran. libgomp reads this once, when torch is imported. A user's own setting stays.
    """
    spinning = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    has_accelerator = any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()
    if not has_accelerator and not any(name in environ for name in spinning):
        environ["OMP_WAIT_POLICY"] = "PASSIVE"


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
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        # A panic of a library in Rust, which is no Exception. Of those that we call, tokenizers
        # panics on purpose: where an expression in tokenizer.json takes too many tries.
        raise DataError(
            f"a tokenizer gave up on a text: {str(error)[:200]}. An expression in its "
            "tokenizer.json may need time without end, as in a broken or hostile model. Take the "
            "tokenizer.json of the model that this one was made from."
        ) from None


if __name__ == "__main__":
    main()
