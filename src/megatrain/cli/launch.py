"""`megatrain train --gpus N`: N ranks on this host, as child processes of this one.

The ranks meet at a store of this process. It listens on the loopback, as they do, so nothing of the
run is reached from another host; and it keeps bytes, which nobody unpickles. Each rank is the
leader of a session: a terminal's Ctrl-C comes to this process alone, which passes it on.

    a signal                   goes to every rank; they finish their step and save, however long
                               that takes
    a rank fails               the others notice and end; those that do not are asked after
                               NOTICE_S, and killed END_S later
    this process is killed     the ranks lose the store, and the system sends them SIGTERM
                               (megatrain/ranks/launcher.py)

Laws (tests/cli/test_launch.py, tests/run/test_gpus.py)
    1. Every word of the command but `--gpus` reaches every rank.
    2. A signal reaches the ranks; the exit code is that of the rank that failed first by itself.
    3. No process of the run listens on anything but the loopback, or unpickles what it reads there.
    4. No rank outlives this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from megatrain.cli.measuring import VARIABLE as MEASURE
from megatrain.devices.runtime import num_accelerators
from megatrain.errors import Interrupted, NoDevice, RankLost
from megatrain.memory.host import num_cores
from megatrain.ranks.launcher import LAUNCHER
from megatrain.ranks.meeting import LOOPBACK, serve
from megatrain.run.interrupts import SIGNALS

NOTICE_S = 10.0
"""Time for the other ranks to notice by themselves, and to say, that one has failed."""
END_S = 30.0
"""Time for a rank to end after SIGTERM, because another has failed."""
_POLL_S = 0.05
_STORE_S = 60.0


def launch(num_ranks: int, words: Sequence[str], device: str) -> int:
    """Run `megatrain WORDS` on so many ranks; return the exit code of all. Raises NoDevice."""
    _require_devices(num_ranks, device)
    words = without_option(words, "--gpus")
    return run_ranks([sys.executable, "-u", "-m", "megatrain", *words], num_ranks)


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


def run_ranks(command: Sequence[str], num_ranks: int, notice_s: float = NOTICE_S) -> int:
    """Run a command once for each rank; return the exit code of all. Of the main thread only."""
    store = serve(LOOPBACK, 0, _STORE_S)  # kept until all ranks have ended
    asked: list[int] = []
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does; ranks inherit that
            signal.signal(number, lambda number, _: asked.append(number))
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(num_ranks):
            environment = rank_environment(rank, num_ranks, store.port, os.environ)  # type: ignore[attr-defined]
            ranks[rank] = subprocess.Popen(command, env=environment, start_new_session=True)
        return _wait(ranks, asked, notice_s)
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()


def rank_environment(
    rank: int, num_ranks: int, port: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a rank: what torchrun sets on one host, and the loopback."""
    number, size = str(rank), str(num_ranks)
    own = {
        "RANK": number, "LOCAL_RANK": number, "ROLE_RANK": number, "GROUP_RANK": "0",
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHER: str(os.getpid()), MEASURE: "0",  # the launcher has, or could not
    }  # fmt: skip
    if sys.platform == "linux":  # also if another one is set, for runs over several hosts
        own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    threads = str(max(1, num_cores() // num_ranks))
    kept = {"OMP_NUM_THREADS": threads, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return kept | dict(environment) | own


def exit_code(codes: Collection[int]) -> int:
    """Return the code of all, given those of ranks that failed, the earliest first.

    A rank that was lost, or was ended because another had failed, did not fail by itself.
    """
    own = [code for code in codes if code > 0 and code != RankLost.exit_code]
    if own or not codes:
        return own[0] if own else 0
    return RankLost.exit_code


def _wait(ranks: Mapping[int, subprocess.Popen[bytes]], asked: list[int], notice_s: float) -> int:
    """Pass signals on until all ranks have ended, and end them if one fails; return the code."""
    alive, codes = dict(ranks), list[int]()
    passed_on, failed_s, was_ended = set[int](), 0.0, False
    while alive:
        while asked:
            passed_on.add(number := asked.pop(0))
            _signal_all(alive, number)
        for rank, process in list(alive.items()):
            if (code := process.poll()) is None:
                continue
            del alive[rank]
            code = Interrupted.exit_code if -code in passed_on else code
            if code and not (was_ended and code in (Interrupted.exit_code, -signal.SIGTERM)):
                codes.append(code)
                failed_s = failed_s or time.monotonic()
                _report(rank, code)
        if failed_s and not was_ended and time.monotonic() > failed_s + notice_s:
            was_ended = True
            _signal_all(alive, signal.SIGTERM)
        if failed_s and time.monotonic() > failed_s + notice_s + END_S:
            _signal_all(alive, signal.SIGKILL)
        time.sleep(_POLL_S)
    return exit_code(codes)


def _signal_all(alive: Mapping[int, subprocess.Popen[bytes]], number: int) -> None:
    for process in alive.values():
        process.send_signal(number)  # of one that has ended: nothing


def _report(rank: int, code: int) -> None:
    """Say what a rank that was killed cannot say itself."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " If that was not you, memory may have run out: see dmesg."
        text = f"rank {rank} was ended by {name}.{hint if -code == signal.SIGKILL else ''}"
        print(text, file=sys.stderr, flush=True)


def _require_devices(num_ranks: int, device: str) -> None:
    count = num_accelerators()
    if device == "cpu":
        print(f"memory.device is cpu: {num_ranks} ranks share the CPU", file=sys.stderr, flush=True)
    elif num_ranks > count:
        raise NoDevice(
            f"--gpus {num_ranks}: torch finds {count} devices on this machine. Give at most as "
            "many, or set memory.device=cpu to try ranks on the CPU."
        )
