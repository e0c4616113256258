"""`megatrain train --gpus N`: N ranks on this host, started as torchrun does it.

torch.distributed.run starts and watches the ranks. It runs in a thread here, because in the main
thread it would answer a signal by killing them after 30 s. The main thread passes signals on to
the ranks, which finish their step and save, however long that takes.

Laws (tests/cli/test_launch.py)
    1. Every word of the command but `--gpus` reaches every rank.
    2. A signal reaches the ranks; the exit code is that of the rank that failed first by itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

from megatrain.devices.runtime import num_accelerators
from megatrain.errors import NoDevice, RankLost
from megatrain.memory.host import num_cores
from megatrain.run.interrupts import SIGNALS

_THREADS = "OMP_NUM_THREADS"


def launch(num_ranks: int, words: Sequence[str], device: str) -> int:
    """Run `megatrain WORDS` on so many ranks; return the exit code of all. Raises NoDevice."""
    words = without_option(words, "--gpus")
    _require_devices(num_ranks, device)
    # torchrun's default is 1.
    os.environ.setdefault(_THREADS, str(max(1, num_cores() // num_ranks)))
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # ranks speak themselves
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(_run(num_ranks, words)), name="launcher", daemon=True
    )
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # a signal is handled between two waits
    return codes[0] if codes else 1


def without_option(words: Sequence[str], option: str) -> list[str]:
    """Return the words of a command without an option and its value."""
    kept, skips = [], False
    for word in words:
        if skips:
            skips = False
        elif word == option:
            skips = True
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def exit_code(codes: Collection[int]) -> int:
    """Return the code of all, given those of ranks that failed, the earliest first.

    A rank that was lost, or was ended because another had failed, did not fail by itself.
    """
    own = [code for code in codes if code > 0 and code != RankLost.exit_code]
    if own or not codes:
        return own[0] if own else 0
    return RankLost.exit_code


def _run(num_ranks: int, words: Sequence[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "megatrain"]
    try:
        start: Any = torchrun.run  # untyped
        start(torchrun.get_args_parser().parse_args([*options, *words]))
    except ChildFailedError as error:
        failures: list[Any] = sorted(error.failures.values(), key=lambda one: one.timestamp)
        return exit_code([one.exitcode for one in failures])
    return 0


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal to every rank."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, OSError):
            if os.getsid(child.pid) == child.pid:  # as only ranks are started
                child.send_signal(number)


def _require_devices(num_ranks: int, device: str) -> None:
    count = num_accelerators()
    if device == "cpu":
        print(f"memory.device is cpu: {num_ranks} ranks share the CPU", file=sys.stderr, flush=True)
    elif num_ranks > count:
        raise NoDevice(
            f"--gpus {num_ranks}: torch finds {count} devices on this machine. Give at most as "
            "many, or set memory.device=cpu to try ranks on the CPU."
        )
