"""DiLoCo: hosts that only a slow network joins train apart, and average their steps now and then.

    torchft_lighthouse --bind 10.8.0.1:29510 --min_replicas 1 --join_timeout_ms 600000
    python examples/diloco.py run.yaml data.seed=1 --lighthouse http://10.8.0.1:29510 \
        --name host_1 --host 10.8.0.2

The first command runs on one host, the second on each. Needs `pip install torchft==0.2.0`. For
hosts that trust each other and share a VPN: torchft listens on all interfaces, asks nobody who they
are, and unpickles what it receives (docs/many.md).

Each host trains a run of its own. After every `--every` steps all of them meet (arXiv 2311.08105):

    quorum      the Lighthouse says who takes part; a host that comes late, or again, gets the
                anchor and the outer momentum from another one, and adds nothing to this exchange
    allreduce   of the difference anchor - masters, in fp32
    vote        a host that did not get all sums tries again
    outer step  SGD with Nesterov momentum on the mean difference moves the anchor
    masters     become the anchor; states of the inner optimizer stay those of the host

The anchor is the fp32 masters after the last exchange. Hosts that took part in the same exchanges
have the same anchor in every bit: compare the hashes that they print.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import xxhash
from torch import Tensor
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]

import megatrain as mt
from megatrain.memory.master import join, split_into
from megatrain.memory.store import Store

LONGEST_ROUND = timedelta(days=1)
"""How long the first host waits for the others to arrive at an exchange. The Lighthouse's
`--join_timeout_ms` ends that earlier, and goes on without those that are late."""


def read_masters(store: Store) -> list[Tensor]:
    """Return copies of all fp32 masters, flat, one for each trained segment of the store.

    No update may be pending.
    """
    masters = []
    for segment in store.layout.segments:
        if not segment.trained:
            continue
        weights = store.segment(segment, mt.TensorKind.HI)
        if segment.dtype is torch.float32:
            masters.append(weights.clone())
        else:
            region = store.region(segment.block, mt.TensorKind.LO)  # None where they are in memory
            masters.append(join(weights, store.segment(segment, mt.TensorKind.LO, region)))
    return masters


def write_masters(store: Store, masters: list[Tensor]) -> None:
    """Make what `read_masters` returned, or a sum of such, the masters and the weights."""
    trained = [segment for segment in store.layout.segments if segment.trained]
    for segment, master in zip(trained, masters, strict=True):
        weights = store.segment(segment, mt.TensorKind.HI)
        if segment.dtype is torch.float32:
            weights.copy_(master)
        else:
            with store.changing(segment.block, mt.TensorKind.LO) as region:
                split_into(master, weights, store.segment(segment, mt.TensorKind.LO, region))


class DiLoCo(mt.Callback):
    """The exchanges of one host, as a callback of its run.

    `connect` gets this object and returns a torchft.Manager, which calls `state_dict` and
    `load_state_dict`. Host memory: 8 bytes per trained parameter, 12 during an exchange.
    """

    def __init__(
        self,
        connect: Callable[[DiLoCo], Any],
        *,
        every: int = 30,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        self.connect = connect
        self.every = every
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.anchor: list[Tensor] = []
        """fp32 masters after the last exchange, as `read_masters` returns them."""
        self.outer: torch.optim.SGD
        """The outer optimizer, over the anchor."""
        self.manager: Any = None
        self.is_behind = False
        """The anchor came from another host, so the masters here are no steps away from it."""

    def on_train_begin(
        self,
        config: mt.Config,
        state: mt.TrainerState,
        control: mt.TrainerControl,
        *,
        trainer: Any = None,
        **_: Any,
    ) -> None:
        """Take the anchor of the other hosts, before any step is taken in vain."""
        trainer.engine.synchronize()
        self.anchor = read_masters(trainer.home.store)
        self.outer = torch.optim.SGD(
            self.anchor, self.learning_rate, self.momentum, nesterov=self.momentum > 0
        )
        self.manager = self.connect(self)
        self.exchange(trainer)

    def on_step_end(
        self,
        config: mt.Config,
        state: mt.TrainerState,
        control: mt.TrainerControl,
        *,
        trainer: Any = None,
        **_: Any,
    ) -> None:
        """Exchange if it is time. The evaluation and the save of this step come afterwards."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            num_hosts = self.exchange(trainer)
            print(
                f"step {state.global_step}: exchange {self.manager.current_step()}, "
                f"steps of {num_hosts} host(s), anchor {self.anchor_hash()}",
                flush=True,
            )

    def exchange(self, trainer: mt.Trainer) -> int:
        """Make the masters the new anchor; return the number of hosts whose steps are in it."""
        trainer.engine.synchronize()
        trainer.checkpoints.wait()  # a save reads the masters behind training
        store = trainer.home.store
        while (num_hosts := self.try_exchange(store)) is None:
            pass  # a host was lost; the next quorum is without it
        write_masters(store, self.anchor)
        self.is_behind = False
        return num_hosts

    def try_exchange(self, store: Store) -> int | None:
        """Move the anchor; return None, and leave it, if the sums are incomplete."""
        self.manager.start_quorum()  # waits for the others; may call `load_state_dict`
        differences = read_masters(store)
        for anchor, difference in zip(self.anchor, differences, strict=True):
            torch.sub(anchor, difference, out=difference)
            if self.is_behind:
                difference.zero_()
        num_hosts = torch.tensor([0.0 if self.is_behind else 1.0])
        for summed in (*differences, num_hosts):
            self.manager.allreduce(summed, reduce_op=ReduceOp.SUM).wait()
        if not self.manager.should_commit():
            return None
        for anchor, difference in zip(self.anchor, differences, strict=True):
            anchor.grad = difference.div_(num_hosts.clamp(min=1))
        self.outer.step()
        self.outer.zero_grad()
        return int(num_hosts)

    def state_dict(self) -> dict[str, Any]:
        """Return what a host that is behind needs."""
        return {"anchor": self.anchor, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another host's `state_dict` returned."""
        for anchor, theirs in zip(self.anchor, state["anchor"], strict=True):
            anchor.copy_(theirs)
        self.outer.load_state_dict(state["outer"])
        self.is_behind = True

    def anchor_hash(self) -> str:
        """Return a hash of the anchor, which is the same on all hosts."""
        found = xxhash.xxh3_64()
        for anchor in self.anchor:
            found.update(anchor.numpy().data)
        return found.hexdigest()


def connect(diloco: DiLoCo, rendezvous: TCPStore, given: argparse.Namespace) -> Any:
    """Return the manager of this host, which others reach at `--host`.

    Their process group finds itself by `rendezvous`, which must outlive the manager.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing import HTTPTransport

    address = socket.gethostbyname(given.host)
    interfaces = psutil.net_if_addrs().items()
    # By itself gloo takes the interface of this machine's name, which is often the loopback.
    os.environ["GLOO_SOCKET_IFNAME"] = next(
        name for name, own in interfaces if any(one.address == address for one in own)
    )
    timeout = timedelta(seconds=given.timeout)
    transport = HTTPTransport(timeout=timeout, num_chunks=0)
    # By itself it sends others to this machine's name, which they may not know.
    port = urlsplit(transport.address()).port
    transport.address = lambda: f"http://{given.host}:{port}/checkpoint/"
    return Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        state_dict=diloco.state_dict,
        load_state_dict=diloco.load_state_dict,
        checkpoint_transport=transport,
        timeout=timeout,
        quorum_timeout=LONGEST_ROUND,
        use_async_quorum=False,
        min_replica_size=1,
        replica_id=given.name,
        lighthouse_addr=given.lighthouse,
        hostname=given.host,
        store_addr=given.host,
        store_port=rendezvous.port,
        rank=0,  # each host is a group of one rank
        world_size=1,
    )


def main() -> None:
    """Train the run of this host; the same command again continues it."""
    parser = argparse.ArgumentParser(description="One host of several that train by DiLoCo.")
    parser.add_argument("config", help="run.yaml: rows and save.dir are those of this host")
    parser.add_argument("settings", nargs="*", help="settings that replace its own: data.seed=1")
    parser.add_argument("--lighthouse", required=True, help="like http://10.8.0.1:29510")
    parser.add_argument("--name", required=True, help="ends with a number that no other host has")
    parser.add_argument("--host", required=True, help="name or address by which others reach it")
    parser.add_argument("--every", type=int, default=30, help="steps between two exchanges")
    parser.add_argument("--rate", type=float, default=0.7, help="learning rate of the outer step")
    parser.add_argument("--momentum", type=float, default=0.9, help="its momentum")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, help="longest seconds to send the anchor to a host"
    )
    given = parser.parse_args()
    if not given.name[-1:].isdigit():
        parser.error("--name ends with a number: torchft takes it for the rank of the host")
    config = mt.load_config(given.config, given.settings)
    if "rollback" in (config.train.on_nonfinite, config.train.on_spike):
        parser.error("train.on_nonfinite or train.on_spike is rollback: the others cannot go back")
    rendezvous = TCPStore(given.host, 0, is_master=True, wait_for_workers=False)
    diloco = DiLoCo(
        lambda diloco: connect(diloco, rendezvous, given),
        every=given.every,
        learning_rate=given.rate,
        momentum=given.momentum,
    )
    with mt.Trainer(config, callbacks=[diloco]) as trainer:
        try:
            trainer.train(resume_from_checkpoint=True)
        finally:
            if diloco.manager is not None:
                diloco.manager.shutdown(wait=False)


if __name__ == "__main__":  # preparing rows starts processes, which import this file
    main()
