"""What ops do, played on a memory that holds facts in place of tensors.

Written from what the actions must do, and on purpose without a look at what ops *declare*: it
takes from an op only its kind, block, micro-batch and places. So it is a second opinion
twice over. The facts show whether a schedule computes the right thing; the accesses are the truth
against which declarations are held (tests/testkit/test_oracle.py).

`step` counts training steps, `version` the updates a block has seen. Inputs on the tape and
gradients are *used up*: whoever takes one leaves the place empty, and only an empty place may be
filled. That one rule says "drained once", "nothing clobbered" and "tape empty at the end".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatrain.errors import ScheduleError
from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.shape import StepShape

Fact = tuple[str | int, ...]
"""Its sort, then the numbers that `FACT_TEXT` places into words."""

FACT_TEXT = {
    "weights": "the weights of block {} at version {}",
    "part": "the part of this rank of the weights of block {} at version {}",
    "master": "the master of block {} at version {}",
    "output": "the output of block {1} for micro-batch {2} in list {0}",
    "activations": "the activations of block {1} for micro-batch {2} in step {0}",
    "input": "the input of block {1} for micro-batch {2} in step {0}",
    "dinput": "the input gradient of block {1} for micro-batch {2} in step {0}",
    "loss": "the loss of micro-batch {1} in list {0}",
    "all routing": "the routing of list {0} of all ranks",
    "routing": "the routing of list {0} up to block {1} and micro-batch {2}",
    "gradient": "the gradient of block {1} in step {0} with {2} of its parts",
    "exchanged": "the gradient of block {1} in step {0}, added up over all ranks",
    "summed": "the gradient of block {1} in step {0} of all ranks",
    "norm": "the norm of block {1} in step {0}",
    "clip": "the clip factor of step {0}",
    "direction": "the direction of block {1} in step {0}, {2}",
    "moved": "the master of block {} at version {}, its momentum moved",
    "adding": "the gradient of block {1} in step {0}, which still adds up",
}
USED_UP = frozenset({"tape", "tape_slot", "kept", "grad_slot", "grad", "host_grad"})


def fact_text(fact: Fact | None) -> str:
    return "nothing" if fact is None else FACT_TEXT[str(fact[0])].format(*fact[1:])


class FactMemory:
    """Places and the facts in them. Notes which places have been read and written."""

    def __init__(self) -> None:
        self.facts: dict[Resource, Fact] = {}
        self.reads: list[Resource] = []
        self.writes: list[Resource] = []

    def require(self, place: Resource, wanted: Fact) -> None:
        if (found := self.facts.get(place)) != wanted:
            raise ScheduleError(
                f"{resource_text(place)} holds {fact_text(found)}, needed is {fact_text(wanted)}"
            )

    def use(self, place: Resource, wanted: Fact) -> None:
        self.reads.append(place)
        self.require(place, wanted)

    def take(self, place: Resource, wanted: Fact) -> None:
        self.use(place, wanted)
        del self.facts[place]

    def put(self, place: Resource, fact: Fact) -> None:
        self.writes.append(place)
        if place[0] in USED_UP and place in self.facts:
            raise ScheduleError(
                f"{resource_text(place)} still holds {fact_text(self.facts[place])}, "
                f"there is no room for {fact_text(fact)}"
            )
        self.facts[place] = fact

    def write_on(self, place: Resource, fact: Fact) -> None:
        """Complete what the place holds."""
        self.writes.append(place)
        self.facts[place] = fact


class Meaning:
    """A machine of one shape that plays lists of ops: training steps, flushes, evaluations."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.memory = FactMemory()
        for block in range(shape.num_blocks):
            self.memory.facts["weights", block] = ("weights", block, 0)
            self.memory.facts["master", block] = ("master", block, 0)
        self._step = 0
        self._list = 0
        self._training = False
        self._actions: Mapping[OpKind, Callable[[Op, int, int], None]] = {
            OpKind.FETCH: self._fetch,
            OpKind.GATHER: self._gather,
            OpKind.RESTORE: self._restore,
            OpKind.FORWARD: self._forward,
            OpKind.HEAD: self._head,
            OpKind.BALANCE: self._balance,
            OpKind.BACKWARD: self._backward,
            OpKind.STASH: self._stash,
            OpKind.EXCHANGE: self._exchange,
            OpKind.DRAIN: self._drain,
            OpKind.NORM: self._norm,
            OpKind.CLIP: self._clip,
            OpKind.MOMENTUM: self._momentum,
            OpKind.SEND: self._send,
            OpKind.COLLECT: self._collect,
            OpKind.ORTHOGONALIZE: self._orthogonalize,
            OpKind.RETURN: self._return,
            OpKind.UPDATE: self._update,
            OpKind.READ: self._read,
            OpKind.WRITE: self._write,
        }
        self._num_places: Mapping[str | int, int] = {
            "slot": shape.slots,
            "grad_slot": shape.grad_slots,
            "tape_slot": shape.tape_slots,
            "host_grad": shape.host_grads,
            "tier_slot": shape.tier_slots,
        }
        self._ahead: dict[int, Resource] = {}
        """By block: the place of what was read for an update that is still to come."""
        self._restored: set[tuple[int, int]] = set()
        """Inputs that were restored for the first of two backwards."""

    def begin(self, ops: Sequence[Op]) -> None:
        """Open a list. It is a training step if it has gradients."""
        self._restored.clear()
        self._training = any(op.kind is OpKind.DRAIN for op in ops)

    def play(self, op: Op) -> tuple[list[Resource], list[Resource]]:
        """Return what the op really reads and really writes.

        Raises ScheduleError if it finds the wrong thing anywhere, or would destroy a right one.
        """
        memory = self.memory
        memory.reads, memory.writes = [], []
        no_number = -1  # the action of a kind without block or micro-batch does not look at it
        block = no_number if op.block is None else op.block
        self._actions[op.kind](op, block, no_number if op.micro is None else op.micro)
        for place in memory.writes:
            self._require_planned(place)
        return memory.reads, memory.writes

    def end(self, ops: Sequence[Op]) -> None:
        """Close the list: its outcome must be there, and nothing else be left to use up."""
        outcome = self._outcome(has_loss=any(op.kind is OpKind.HEAD for op in ops))
        for place, fact in outcome.items():
            self.memory.require(place, fact)
        for place, fact in self.memory.facts.items():
            if place[0] in USED_UP and place not in outcome:
                raise ScheduleError(f"{resource_text(place)} still holds {fact_text(fact)}")
        if self.shape.update == "none":
            for block in self.shape.trained_blocks:
                self.memory.facts.pop(("grad", block), None)
        self._step += self._training
        self._list += 1

    def _outcome(self, *, has_loss: bool) -> dict[Resource, Fact]:
        outcome: dict[Resource, Fact] = {}
        if has_loss:
            for micro in range(self.shape.num_micro):
                outcome["loss", micro] = ("loss", self._list, micro)
        if self.shape.update == "late":
            for block in self.shape.trained_blocks:
                outcome["master", block] = ("master", block, self._step)
        if self._training:
            for block in self.shape.trained_blocks:
                if self.shape.update in ("in_backward", "second_backward"):
                    outcome["weights", block] = ("weights", block, self._step + 1)
                    outcome["master", block] = ("master", block, self._step + 1)
                else:
                    outcome["grad", block] = self._whole_gradient(block, self._step)
            if self.shape.update in ("late", "second_backward"):
                outcome["clip",] = ("clip", self._step)
        return outcome

    def _require_planned(self, place: Resource) -> None:
        most = self._num_places.get(place[0])
        if most is not None and isinstance(place[1], int) and place[1] >= most:
            raise ScheduleError(f"{resource_text(place)} does not exist, the plan has {most}")

    # Actions, in the order of a step.

    def _fetch(self, op: Op, block: int, micro: int) -> None:
        weights = self._weights(block)
        self.memory.use(("weights", block), weights)
        self.memory.put(
            _at(op, "slot", "fetched", block), self._part(block) if self.shape.divided else weights
        )

    def _gather(self, op: Op, block: int, micro: int) -> None:
        place = _at(op, "slot", "fetched", block)
        self.memory.use(place, self._part(block))
        self.memory.put(place, self._weights(block))

    def _forward(self, op: Op, block: int, micro: int) -> None:
        self._use_weights(op, block)
        if block > 0:
            self.memory.use(("hidden", micro), ("output", self._list, block - 1, micro))
            if self._training and block >= self.shape.lowest:
                self.memory.put(*self._kept_for_backward(op, block, micro))
            if self.shape.balances:
                self._count_routing(block, micro)
        self.memory.put(("hidden", micro), ("output", self._list, block, micro))

    def _count_routing(self, block: int, micro: int) -> None:
        """Add to what the ops before have counted: of the same layer, then of the one below."""
        if micro > 0:
            self.memory.use(("routing",), ("routing", self._list, block, micro - 1))
        elif block > 1:
            self.memory.use(("routing",), self._routing(block - 1))
        self.memory.put(("routing",), ("routing", self._list, block, micro))

    def _balance(self, op: Op, block: int, micro: int) -> None:
        """Add up what all ranks have counted. One without micro-batches has counted nothing."""
        self.memory.reads.append(("routing",))
        if self.shape.num_micro > 0:
            self.memory.require(("routing",), self._routing(self.shape.last_layer))
        self.memory.put(("routing",), ("all routing", self._list))

    def _whole_routing(self) -> Fact:
        """The routing that losses and gradients need."""
        shape = self.shape
        return ("all routing", self._list) if shape.divided else self._routing(shape.last_layer)

    @property
    def _goes_back_again(self) -> bool:
        """Whether this is the first of two backwards: the norm of the step is not known yet."""
        twice = self.shape.update == "second_backward"
        return twice and self.memory.facts.get(("clip",)) != ("clip", self._step)

    def _use_up(self, place: Resource, fact: Fact) -> None:
        """Find a fact that nothing needs any more, unless backward runs once more."""
        (self.memory.use if self._goes_back_again else self.memory.take)(place, fact)

    def _stash(self, op: Op, block: int, micro: int) -> None:
        self.memory.take(
            _at(op, "tape_slot", "saved_input", block, micro), self._input(block, micro)
        )
        self.memory.put(("tape", block, micro), self._input(block, micro))

    def _restore(self, op: Op, block: int, micro: int) -> None:
        if self.shape.update == "second_backward" and (block, micro) not in self._restored:
            self._restored.add((block, micro))  # for the first of two backwards: it stays
            self.memory.use(("tape", block, micro), self._input(block, micro))
        else:
            self.memory.take(("tape", block, micro), self._input(block, micro))
        self.memory.put(
            _at(op, "tape_slot", "saved_input", block, micro), self._input(block, micro)
        )

    def _head(self, op: Op, block: int, micro: int) -> None:
        shape = self.shape
        self._use_weights(op, block)
        if shape.tied:
            self._use_weights(op, 0)
        self.memory.use(("hidden", micro), ("output", self._list, block - 1, micro))
        if shape.balances and micro == 0:
            self.memory.use(("routing",), self._whole_routing())
        self.memory.put(("loss", micro), ("loss", self._list, micro))
        if self._training:
            if shape.lowest < block:
                self.memory.put(("dhidden", micro), ("dinput", self._step, block, micro))
            if shape.trained[block]:
                self._accumulate(op, block, part=micro, adds=op.adds)
            if shape.tied and shape.trained[0]:
                self._accumulate(op, 0, part=micro, adds=op.adds)

    def _backward(self, op: Op, block: int, micro: int) -> None:
        shape = self.shape
        self._use_weights(op, block)
        self.memory.use(("dhidden", micro), ("dinput", self._step, block + 1, micro))
        if block > 0:
            place, fact = self._kept_for_backward(op, block, micro)
            (self.memory.take if place[0] == "tape_slot" else self._use_up)(place, fact)
            if shape.balances:
                self.memory.use(("routing",), self._whole_routing())
        if block > shape.lowest:
            self.memory.put(("dhidden", micro), ("dinput", self._step, block, micro))
        if shape.trained[block]:
            behind_head = shape.num_micro if shape.tied and block == 0 else 0
            self._accumulate(op, block, part=behind_head + micro, adds=op.adds)

    def _accumulate(self, op: Op, block: int, *, part: int, adds: bool) -> None:
        place = _at(op, "grad_slot", "grad_sum", block)
        if adds:
            self.memory.take(place, ("gradient", self._step, block, part))
        self.memory.put(place, ("gradient", self._step, block, part + 1 if adds else 1))
        if (ring := self._ring_of_edge(block)) is not None:
            if adds:
                self.memory.write_on(ring, ("adding", self._step, block))
            else:
                self.memory.put(ring, ("adding", self._step, block))

    def _ring_of_edge(self, block: int) -> Resource | None:
        """Return where embedding and head add up, if that is in the ring."""
        shape = self.shape
        in_ring = shape.update in ("in_backward", "second_backward")
        if shape.copying or not in_ring or 0 < block < shape.head:
            return None
        return ("host_grad", "head" if block and shape.tied else "edge")

    def _exchange(self, op: Op, block: int, micro: int) -> None:
        """Add up over all ranks what this one has added up, which may be nothing at all."""
        place, num_micro = _at(op, "grad_slot", "grad_sum", block), self.shape.num_micro
        if not self.shape.divided:
            raise ScheduleError("there are no other ranks")
        times = 2 if self.shape.tied and block == 0 else 1
        if num_micro:
            self.memory.take(place, ("gradient", self._step, block, num_micro * times))
        self.memory.put(place, ("exchanged", self._step, block))

    def _drain(self, op: Op, block: int, micro: int) -> None:
        whole = self._whole_gradient(block, self._step)
        found = ("exchanged", self._step, block) if self.shape.divided else whole
        self.memory.take(_at(op, "grad_slot", "grad_sum", block), found)
        if self._ring_of_edge(block) is None:
            self.memory.put(self._drained_at(op, block), whole)
        else:
            self.memory.require(self._drained_at(op, block), ("adding", self._step, block))
            self.memory.write_on(self._drained_at(op, block), whole)

    def _norm(self, op: Op, block: int, micro: int) -> None:
        gradient = self._whole_gradient(block, self._step)
        if block == 0 and self.shape.gather_embedding:  # made whole, in its own place
            self.memory.take(self._drained_at(op, block), gradient)
            self.memory.put(self._drained_at(op, block), gradient)
            if self._goes_back_again:
                self.memory.facts.pop(self._drained_at(op, block))
        elif self._goes_back_again:  # its norm was all that was wanted
            self.memory.take(self._drained_at(op, block), gradient)
        else:
            self.memory.use(self._drained_at(op, block), gradient)
        self.memory.put(("norm", block), ("norm", self._step, block))

    def _clip(self, op: Op, block: int, micro: int) -> None:
        for trained in self.shape.trained_blocks:
            self.memory.use(("norm", trained), ("norm", self._step, trained))
        self.memory.put(("clip",), ("clip", self._step))

    def _momentum(self, op: Op, block: int, micro: int) -> None:
        """Move a momentum; the direction takes the place of the gradient."""
        step, place, master = (
            self._use_verdict(block),
            self._drained_at(op, block),
            self._state_at(op, block),
        )
        self.memory.take(place, self._whole_gradient(block, step))
        self.memory.put(place, ("direction", step, block, "of this rank"))
        self.memory.use(master, ("master", block, step))
        self.memory.put(master, ("moved", block, step))

    def _send(self, op: Op, block: int, micro: int) -> None:
        """The host's copy stays as it is until the result takes its place."""
        direction = ("direction", self._updated_step, block, "of this rank")
        self.memory.use(self._drained_at(op, block), direction)
        self.memory.put(_at(op, "grad_slot", "direction", block), direction)

    def _collect(self, op: Op, block: int, micro: int) -> None:
        place, direction = (
            _at(op, "grad_slot", "direction", block),
            ("direction", self._updated_step, block),
        )
        if not self.shape.divided:
            raise ScheduleError("there are no other ranks")
        self.memory.take(place, (*direction, "of this rank"))
        self.memory.put(place, (*direction, "of all ranks"))

    def _orthogonalize(self, op: Op, block: int, micro: int) -> None:
        copying, direction = self.shape.copying, ("direction", self._updated_step, block)
        place = _at(op, "grad_slot", "direction", block) if copying else self._drained_at(op, block)
        whole = "of all ranks" if self.shape.divided else "of this rank"
        self.memory.take(place, (*direction, whole))
        self.memory.put(place, (*direction, "orthogonalized"))

    def _return(self, op: Op, block: int, micro: int) -> None:
        direction, place = ("direction", self._updated_step, block), self._drained_at(op, block)
        self.memory.take(_at(op, "grad_slot", "direction", block), (*direction, "orthogonalized"))
        self.memory.require(place, (*direction, "of this rank"))
        del self.memory.facts[place]
        self.memory.put(place, (*direction, "orthogonalized"))

    @property
    def _updated_step(self) -> int:
        """The step whose gradients updates use."""
        return self._step - 1 if self.shape.update == "late" else self._step

    def _use_verdict(self, block: int) -> int:
        """Look up whether, and how, the gradient of a block applies; return its step."""
        step = self._updated_step
        if self.shape.update != "in_backward":
            self.memory.use(("clip",), ("clip", step))
        if self.shape.update != "late":
            self.memory.use(("norm", block), ("norm", step, block))
        return step

    def _state_at(self, op: Op, block: int) -> Resource:
        """The place of the master that an op works on."""
        if self.shape.has_tier:
            return _at(op, "tier_slot", "optim_state", block)
        return ("master", block)

    def _update(self, op: Op, block: int, micro: int) -> None:
        step, master = self._use_verdict(block), self._state_at(op, block)
        gradient = self._whole_gradient(block, step)
        if self.shape.matrices[block]:
            gradient = ("direction", step, block, "orthogonalized")
        self.memory.take(self._drained_at(op, block), gradient)
        if self.shape.matrices[block]:
            self.memory.use(master, ("moved", block, step))
        else:
            self.memory.use(master, ("master", block, step))
        self.memory.put(master, ("master", block, step + 1))
        self.memory.put(("weights", block), ("weights", block, step + 1))
        self._ahead.pop(block, None)

    def _read(self, op: Op, block: int, micro: int) -> None:
        step = int(self.memory.facts["weights", block][2])  # the first whose update they lack
        self.memory.use(("master", block), ("master", block, step))
        self._ahead[block] = _at(op, "tier_slot", "optim_state", block)
        self.memory.put(self._ahead[block], ("master", block, step))

    def _write(self, op: Op, block: int, micro: int) -> None:
        step = self._step if self.shape.update == "late" else self._step + 1
        self.memory.use(_at(op, "tier_slot", "optim_state", block), ("master", block, step))
        self.memory.put(("master", block), ("master", block, step))

    # Facts and places that the shape decides.

    def _weights(self, block: int) -> Fact:
        updated = self.shape.trained[block] and self.shape.update != "none"
        return ("weights", block, self._step if updated else 0)

    def _part(self, block: int) -> Fact:
        return ("part", *self._weights(block)[1:])

    def _use_weights(self, op: Op, block: int) -> None:
        copying = self.shape.copying
        place = _at(op, "slot", "fetched", block) if copying else ("weights", block)
        self.memory.use(place, self._weights(block))
        if self.shape.pages and 0 < block < self.shape.head:  # its experts come while it computes
            self.memory.use(("weights", block), self._weights(block))

    def _input(self, block: int, micro: int) -> Fact:
        return ("input", self._step, block, micro)

    def _routing(self, block: int) -> Fact:
        """All micro-batches counted in the layers up to `block`."""
        return ("routing", self._list, block, self.shape.num_micro - 1)

    def _whole_gradient(self, block: int, step: int) -> Fact:
        """A gradient on the host: of all parts, or of all ranks."""
        if self.shape.divided:
            return ("summed", step, block)
        times = 2 if self.shape.tied and block == 0 else 1
        return ("gradient", step, block, self.shape.num_micro * times)

    def _kept_for_backward(self, op: Op, block: int, micro: int) -> tuple[Resource, Fact]:
        """Return where forward leaves what to backward: of the top layers all, else the input."""
        if self.shape.num_blocks - 1 - block <= self.shape.kept_layers:
            return ("kept", block, micro), ("activations", self._step, block, micro)
        on_host = self.shape.tape == "host"
        place = (
            _at(op, "tape_slot", "saved_input", block, micro) if on_host else ("tape", block, micro)
        )
        return place, self._input(block, micro)

    def _drained_at(self, op: Op, block: int) -> Resource:
        in_ring = self.shape.update in ("in_backward", "second_backward")
        return _at(op, "host_grad", "drained_grad", block) if in_ring else ("grad", block)


def _at(op: Op, family: str, *thing: str | int) -> Resource:
    """Return the place of a thing that an op works on: one of a family, by what the op names."""
    place = op.places.get(thing, ())
    if place[:1] != (family,):
        raise ScheduleError(f"the op names no {family}")
    return place


def resource_text(resource: Resource) -> str:
    """`("tape", 3, 1)` as `tape[3,1]`."""
    family, *where = resource
    return f"{family}[{','.join(map(str, where))}]" if where else str(family)
