"""`megatrain train --gpus N`: N ranks on this host, under torch's elastic agent in this process.

Several hosts start the same command with torchrun, which is the same agent. Two things differ. The
ranks meet at a store that listens on the loopback, as they do, so nothing of the run is reached
from another host; that of torchrun listens on all interfaces, also with `--master-addr 127.0.0.1`.
And each rank is the leader of a session: a terminal's Ctrl-C comes to this process alone, which
passes it on. The agent itself would end ranks that have not saved within a time.

    a signal                   goes to every rank; they finish their step and save, however long
                               that takes
    a rank fails               the agent sends SIGTERM to the others, and SIGKILL END_S later
    this process is killed     the system sends SIGTERM to the ranks (megatrain/ranks/launcher.py)

Laws (tests/cli/test_launch.py, tests/run/test_gpus.py)
    1. Every word of the command but `--gpus` reaches every rank.
    2. A signal reaches the ranks; the exit code is that of the rank that failed first by itself.
    3. No process of the run listens on anything but the loopback, or unpickles what it reads there.
    4. No rank outlives this process.
    5. The words of the rank that failed first are shown once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatrain.cli.measuring import VARIABLE as MEASURE
from megatrain.devices.runtime import num_accelerators
from megatrain.errors import Interrupted, NoDevice, RankLost
from megatrain.memory.host import num_cores
from megatrain.ranks.launcher import LAUNCHER
from megatrain.run.interrupts import SIGNALS

LOOPBACK = "127.0.0.1"
END_S = 30
"""Time for a rank to end after SIGTERM, because another has failed."""
_STORE_S = 60


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one host. Its store listens on the loopback and keeps bytes, no pickles."""

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((LOOPBACK, 0))
            self.master_port = listener.getsockname()[1]
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                LOOPBACK,
                self.master_port,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


rendezvous_handler_registry.register(
    "loopback", lambda given: LoopbackRendezvous(LOOPBACK, 0, 0, 1, given.run_id, _STORE_S)
)


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


def run_ranks(command: Sequence[str], num_ranks: int, end_s: int = END_S) -> int:
    """Run a command once for each rank; return the exit code of all. Of the main thread only."""
    passed_on: set[int] = set()

    def pass_on(number: int, frame: object) -> None:
        passed_on.add(number)
        ranks = psutil.Process().children()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if not ranks:
            raise SystemExit(Interrupted.exit_code)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does; ranks inherit that
            signal.signal(number, pass_on)
    os.environ |= {LAUNCHER: str(os.getpid()), MEASURE: "0"}  # the launcher has, or could not
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if sys.platform == "linux":  # also if another one is set, for runs over several hosts
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    logging.disable()  # what the agent says of each process that it ends
    with tempfile.TemporaryDirectory(prefix="megatrain-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, max_restarts=0, run_id="local",
            rdzv_backend="loopback", rdzv_endpoint=LOOPBACK, shutdown_timeout=end_s,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="",  # see pass_on
        )  # fmt: skip
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            failures: Any = error.failures
            rank = first_failure({rank: failures[rank].exitcode for rank in failures})
            _show(rank, failures[rank], passed_on)
            return exit_code(failures[rank].exitcode, passed_on)
    return 0


def first_failure(codes: Mapping[int, int]) -> int:
    """Return the rank that failed first, of those that did so by themselves if there are any.

    `codes` has the exit codes of ranks in the order in which the agent saw them end. A rank that
    was lost, or was ended because another had failed, did not fail by itself. Where ranks fail
    alike, it is rank 0, which prints.
    """
    not_own = (RankLost.exit_code, Interrupted.exit_code)
    own = [rank for rank, code in codes.items() if code > 0 and code not in not_own]
    return 0 if 0 in own else (own or list(codes))[0]


def exit_code(code: int, passed_on: Collection[int]) -> int:
    """Return the code of all, given that of the rank that failed first."""
    if code < 0:
        return Interrupted.exit_code if -code in passed_on else RankLost.exit_code
    return code


def _show(rank: int, failure: Any, passed_on: Collection[int]) -> None:
    """Say what a rank that failed has not said: rank 0 prints, and the others leave their words."""
    code, words = failure.exitcode, failure.message
    if code < 0 and -code not in passed_on:
        hint = " If that was not you, memory may have run out: see dmesg."
        text = f"rank {rank} was ended by {failure.signal_name()}."
        print(f"{text}{hint if -code == signal.SIGKILL else ''}", file=sys.stderr, flush=True)
    elif rank and isinstance(words, dict):
        print(f"rank {rank}: {words['message']}", file=sys.stderr, flush=True)


def _require_devices(num_ranks: int, device: str) -> None:
    count = num_accelerators()
    if device == "cpu":
        print(f"memory.device is cpu: {num_ranks} ranks share the CPU", file=sys.stderr, flush=True)
    elif num_ranks > count:
        raise NoDevice(
            f"--gpus {num_ranks}: torch finds {count} devices on this machine. Give at most as "
            "many, or set memory.device=cpu to try ranks on the CPU."
        )
