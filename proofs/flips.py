"""Bits that flip in host memory at random instants, and whether a checkpoint ever has one.

    python -m proofs.flips --count 1000 --json
    python -m proofs.flips --count 50 --spoil off        # memory that is not checked
    python -m proofs.flips --count 50 --spoil updates    # updates take over what they find
    python -m proofs.flips --count 50 --spoil saves      # saves copy what they find

A trial takes two steps of a tiny model and saves, from a known state. One bit of one kind of memory
flips before a random op of the steps, or while the save holds a random block, when the kind rests
there. The trial ends in one of three ways:

    found      the step or the save failed by the damage, and nothing was acknowledged
    harmless   the checkpoint has the bytes of a run that nothing disturbed: what flipped was not
               read any more, or was saved before
    missed     the checkpoint is acknowledged, and has other bytes

Then the state comes back, from a copy, and after the last trial of a kind from a checkpoint, from
which the same two steps must give the undisturbed bytes. Ends with 1 if a flip was missed; with
--spoil it must.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor

from megatrain import AdamW, Engine, HostModel, Lora, StepSettings, load_model
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.save import delete_checkpoint, save_checkpoint
from megatrain.engine import seals
from megatrain.engine.snapshot import Snapshot
from megatrain.errors import MemoryDamaged
from megatrain.lanes.lane import Action
from megatrain.lanes.reference import Done, Reference
from megatrain.memory.kinds import Kind, store_kinds
from megatrain.optim.states import STATES
from megatrain.optim.views import Views
from megatrain.step.ops import Op, OpKind
from testkit.families import save_tiny
from testkit.plain import make_batch

BATCHES = [make_batch([(1, 5)], seed=seed) for seed in range(3)]
NEVER, ALWAYS = 1e3, 1e-3
"""Norms to clip at, so that steps are never clipped, or always."""
CASES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"kinds": ("hi", "lo", "m", "v", "grad")},
    "8bit": {"kinds": ("m", "m_scale", "v", "v_scale"), "state": "8bit"},
    "in backward": {"kinds": ("hi", "v"), "update": "in_backward"},
    "adapters": {"kinds": ("frozen",), "lora": True},
    "ahead of the norm": {"kinds": ("undo",), "speculated_blocks": 99, "clip": ALWAYS},
}
"""The kinds of memory that are disturbed, in which run."""


class Instants(Reference):
    """Plays one op at a time, and calls `disturb` before each."""

    def __init__(self) -> None:
        super().__init__()
        self.disturb: Callable[[], None] = lambda: None
        self.waiting: set[int] = set()
        """Blocks whose gradient has been measured, and waits for its update."""

    def play(self, ops: Sequence[Op], actions: Mapping[OpKind, Action]) -> Done:
        def disturbed(action: Action) -> Action:
            def act(op: Op) -> int | None:
                self.disturb()
                num_bytes = action(op)
                if op.kind is OpKind.NORM and op.block is not None:
                    self.waiting.add(op.block)
                elif op.kind is OpKind.UPDATE and op.block is not None:
                    self.waiting.discard(op.block)
                return num_bytes

            return act

        return super().play(ops, {kind: disturbed(action) for kind, action in actions.items()})


class Case:
    """A tiny model in training, and the bytes of the checkpoint that two steps of it give."""

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        *,
        check: bool,
        state: Any = "fp32",
        update: Any = "late",
        lora: bool = False,
        speculated_blocks: int = 0,
        clip: float = NEVER,
    ) -> None:
        late = update == "late"
        adapters: dict[str, Any] = {"lora": Lora(rank=2, alpha=4)} if lora else {}
        kinds = store_kinds(STATES["adamw"][state], waits=late)
        self.home: HostModel = load_model(folder, kinds=kinds, **adapters)
        self.player = Instants()
        self.engine = Engine(
            self.home.decoder,
            self.home.store,
            optimizer=AdamW(learning_rate=0.01, max_grad_norm=clip if late else None, state=state),
            settings=StepSettings(
                check=check, state=state, update=update, speculated_blocks=speculated_blocks
            ),
            player=self.player,
        )
        self._parts, self._scratch = checkpoint_parts(self.home), scratch
        self.engine.step(BATCHES[0])
        self.engine.settle()
        self._updates = self.engine.num_updates
        self._first = self._saved()
        store = self.home.store
        self._sound = {kind: store.arena(kind).clone() for kind in store.kinds}
        self.num_instants = 0
        self.expected = self.come_back().play(self._count)

    def _count(self) -> None:
        self.num_instants += 1

    def play(self, disturb: Callable[[], None]) -> dict[str, Any]:
        """Take two steps from where the store is; return the files of the checkpoint they save.

        `disturb` is called before each op, and for each block that the save holds. Raises
        MemoryDamaged.
        """
        self.player.disturb = disturb
        try:
            for batch in BATCHES[1:]:
                self.engine.step(batch)
            self.engine.settle()
            path = self._saved(disturb)
        finally:
            self.player.disturb = lambda: None
        files = read_manifest(path).files
        delete_checkpoint(path)
        return {name: record.to_json() for name, record in files.items()}

    def come_back(self, *, from_disk: bool = False) -> Self:
        """Fill memory as it was after the first step: from copies, or from the checkpoint.

        A checkpoint of adapters does not have what is frozen: that is copied.
        """
        self.engine.settle()
        for kind, sound in self._sound.items():
            if not from_disk or kind is Kind.HI:
                self.home.store.arena(kind).copy_(sound)
        if from_disk:
            restore(self._first, read_manifest(self._first), self._parts)
        self.engine.restore(1, self._updates)
        self.engine._machine.updates._clipped = False
        return self

    def _saved(self, disturb: Callable[[], None] = lambda: None) -> Path:
        snapshot = self.engine.snapshot()
        wait = snapshot.wait

        def disturbed(block: int) -> None:
            wait(block)
            disturb()

        with mock.patch.object(snapshot, "wait", disturbed):
            return save_checkpoint(self._scratch, self._parts, snapshot, {})

    def resting(self, kind: str) -> list[Tensor]:
        """Return the bytes of a kind that rest now."""
        store, updates = self.home.store, self.engine._machine.updates
        if kind == "undo":
            kept = updates._undo._kept.values()
            return [copy.view(torch.uint8) for of_block in kept for _, copy in of_block]
        (found,) = [one for one in store.kinds if one.name == kind.replace("frozen", "hi")]
        segments = [s for s in store.layout.segments if s.trained == (kind != "frozen")]
        if found is Kind.GRAD:  # from its norm to its update
            segments = [s for s in segments if s.block in self.player.waiting]
        extents = [s.extent(found) for s in segments if found in s.starts]
        return [store.arena(found)[e.start : e.stop] for e in extents]


class Flip:
    """One bit that flips once, at an instant or as soon after it as the kind rests in memory."""

    def __init__(self, case: Case, kind: str, source: random.Random) -> None:
        self._case, self._kind, self._source = case, kind, source
        self._left = source.randrange(case.num_instants)
        self.done = False

    def __call__(self) -> None:
        self._left -= 1
        if self._left >= 0 or self.done:
            return
        places = [place for place in self._case.resting(self._kind) if place.numel()]
        if not places:
            return
        self.done = True
        (place,) = self._source.choices(places, [part.numel() for part in places])
        place[self._source.randrange(place.numel())] ^= 1 << self._source.randrange(8)


def trial(case: Case, kind: str, source: random.Random) -> str:
    """Flip a bit, and return how that ends."""
    flip = Flip(case, kind, source)
    try:
        found = case.come_back().play(flip)
    except MemoryDamaged:
        return "found" if flip.done else "alarm"
    if not flip.done:
        return "none"
    return "harmless" if found == case.expected else "missed"


def spoil(what: str | None, held: ExitStack) -> None:
    """Break the check in one place, until `held` closes."""
    changing = seals.Seals.changing

    @contextmanager
    def forgiving(sealed: seals.Seals, *given: Any) -> Iterator[Views]:
        before = sealed.damage
        with changing(sealed, *given) as views:
            yield views
        sealed.damage = before

    if what == "updates":
        held.enter_context(mock.patch.object(seals.Seals, "changing", forgiving))
    elif what == "saves":
        held.enter_context(mock.patch.object(Snapshot, "let_go", lambda s, b: s._gate.release(b)))


def run(
    count: int, *, tell: bool, what: str | None, only: Sequence[str] = (), seed: int = 0
) -> dict[str, Any]:
    """Flip `count` bits in each kind; return what was found."""
    torch.set_num_threads(1)
    began, source = time.monotonic(), random.Random(seed)
    kinds: dict[str, dict[str, int]] = {}
    with ExitStack() as held:
        spoil(what, held)
        memory = Path("/dev/shm")
        where = memory if memory.is_dir() else None
        place = held.enter_context(
            tempfile.TemporaryDirectory(prefix="megatrain-flips-", dir=where)
        )
        folder = save_tiny(Path(place) / "model", "llama", torch.bfloat16)
        for name, given in CASES.items():
            if only and name not in only:
                continue
            settings = {key: value for key, value in given.items() if key != "kinds"}
            case = Case(folder, Path(place) / name, check=what != "off", **settings)
            for kind in given["kinds"]:
                ends: Counter[str] = Counter()
                while ends.total() - ends["none"] < count:
                    ends[trial(case, kind, source)] += 1
                del ends["none"]
                again = case.come_back(from_disk=True).play(lambda: None)
                assert again == case.expected, "the state came back"
                kinds[f"{kind}, {name}"] = {"flips": ends.total(), **ends}
                if tell:
                    print(f"{time.monotonic() - began:.0f} s: {kind}, {name}: {dict(ends)}")
            case.engine.close()
    totals: Counter[str] = Counter()
    for of_kind in kinds.values():
        totals.update(of_kind)
    return {
        "what": "flips",
        **{key: totals[key] for key in ("flips", "found", "harmless", "missed", "alarm")},
        "kinds": kinds,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="flips in each kind of memory")
    parser.add_argument("--spoil", choices=["off", "updates", "saves"], help="what to break")
    parser.add_argument("--case", action="append", choices=CASES, default=[], help="only these")
    parser.add_argument("--seed", type=int, default=0, help="of instants and bits")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    result = run(
        options.count,
        tell=not options.json,
        what=options.spoil,
        only=options.case,
        seed=options.seed,
    )
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))
    sys.exit(bool(result["missed"] or result["alarm"]))


if __name__ == "__main__":
    main()
