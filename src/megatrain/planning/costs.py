"""The cost of each op: its time alone on the machine, and its use of shared resources.

A cost is seconds alone, and the rates at which it uses what lanes share meanwhile: host memory
traffic, the two directions of the link, and cores where compute is on the host's. Who slows whom is
the simulator's part. With ranks the machine is that of one of them (ranks/sharing.py).

    products       2 FLOPs per weight and token forward, 4 backward, of which 2 are the weight's own
                   gradient, if it is trained; forward again in backward; in fp8 faster, with
                   more element-wise work (narrow_products.py)
    attention      as products, at a share of their rate; where no fused kernel does it, all scores
                   of a row, and the bytes that each pass over them reads and writes
    element-wise   bytes that norms, rotations and activations read and write
    copies         bytes over the link
    matrices       Muon's momentum and descent over the kernel's rate; directions over the link and
                   back; five steps of products with the smaller side of each matrix
    pages          experts that come while their layer computes: the longer of both
    update         params over the kernel's rate
    disk           bytes of masters and states over the disk's rates
    network        bytes that other ranks own over what is between them (ranks/collectives.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatrain.memory.kinds import TensorKind, bytes_per_param, kinds_of_matrices, update_traffic
from megatrain.optim.states import ADAMW
from megatrain.planning.levers.chunk import num_chunks
from megatrain.planning.levers.embedding_rows import gathered_bytes, gathers, row_bytes
from megatrain.planning.levers.pages import in_slot, walked_bytes
from megatrain.planning.levers.tier import on_disk
from megatrain.planning.levers.tiles import at_once
from megatrain.planning.levers.update import arrives_in_ring
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import BlockShape
from megatrain.planning.narrow_products import gain, narrow_part, narrowing_bytes, weight_traffic
from megatrain.planning.ranks.collectives import Collective, Collectives
from megatrain.planning.workload import Workload
from megatrain.step.ops import Op, OpKind, Role
from megatrain.step.settings import StepSettings


class Traffic(NamedTuple):
    """Bytes that element-wise work reads and writes, by the element that it works on, in bf16."""

    normed: float
    rotated: float
    """Bytes for queries and keys."""
    gated: float
    """Bytes for an activation and its product."""
    activated: float
    """Bytes for an activation alone."""
    added: float
    """Bytes for a residual."""
    adapted: float
    """Bytes for the output of an adapter, scaled and added."""


EAGER = Traffic(normed=36, rotated=20, gated=10, activated=4, added=6, adapted=10)
"""Forward, one op after another, as `python -m benchmarks.fused` counts it: a norm widens, squares,
averages, scales and narrows; a residual is three passes; a rotation is ten, an activation with its
product five."""
EAGER_BACKWARD = Traffic(*(2.3 * moved for moved in EAGER))
FUSED = EAGER._replace(normed=4, rotated=4, gated=6)
"""Forward of fused kernels: each reads its inputs and writes its output. Counted, not measured."""
FUSED_BACKWARD = EAGER_BACKWARD._replace(normed=6, rotated=4, gated=10, added=15)
"""A norm reads its input and the gradient; a product reads both sides and the gradient, and writes
two. Gradients of a residual's two sides are added, and those of all products of one input."""
NUM_PRODUCT_STEPS = 5
"""Newton-Schulz steps of optim/muon.py, which needs torch; a test compares them."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward over forward's: a fused kernel computes the scores once more."""
EAGER_BACKWARD_ATTENTION = 2.0
SCORE_ELEMENTS, BACKWARD_SCORE_ELEMENTS = 13, 20
"""Elements that eager attention reads and writes for each score, 26 and 40 bytes in bf16. Forward
of gpt-oss: the product writes one; scale, mask, the sink's column, and the difference from the
maximum take two each, the maximum one, softmax two, and the product with the values reads one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one op."""

    seconds: float
    """Alone."""
    num_bytes: int = 0
    """Bytes that it moves over the link, or that an update reads of gradients."""
    dram_rate: float = 0.0
    """Host memory bytes per second while it runs alone."""
    cores: float = 0.0
    """Host cores it keeps busy while it runs alone."""
    link: str = ""
    """`in` or `out` if it is on the link."""
    link_share: float = 0.0
    """Fraction of the link's bandwidth that it uses while it runs alone: of `link` if that is
    set, else of both directions."""
    limit: str = ""
    """The limit of a step that waits for it, if not that of its kind: one of LIMITS."""

    def demand(self, way: str) -> float:
        """Return the share of one direction of the link that it uses."""
        if self.link in ("", way):
            return self.link_share or float(self.link == way)
        return 0.0


class Costs:
    """The costs of a workload's ops on a machine."""

    def __init__(self, profile: MachineProfile, workload: Workload, settings: StepSettings) -> None:
        self.profile, self.workload, self.settings = profile, workload, settings
        self._micro_sizes = workload.micro_sizes(settings.micro_batch_tokens)
        self._blocks = workload.model.blocks
        self._on_disk = on_disk(workload, settings)
        self._owned = workload.division.owned
        self._cached: dict[tuple[object, ...], Cost] = {}

    def of(self, op: Op) -> Cost:
        """Return the op's cost. Ops of equal blocks and micro-batches share one object."""
        key = self._key(op)
        cost = self._cached.get(key)
        if cost is None:
            cost = self._cached[key] = self._cost(op)
        return cost

    def _key(self, op: Op) -> tuple[object, ...]:
        if op.block is None:
            return (op.kind,)
        tokens = 0 if op.micro is None else self._micro_sizes[op.micro]
        kind = (op.kind, self._kind_of_block[op.block], _keeps_activations(op))
        return (*kind, tokens, op.adds, op.comes_again)

    @cached_property
    def _kind_of_block(self) -> list[int]:
        return [-1, *self.workload.model.layer_kinds, -2]

    def _cost(self, op: Op) -> Cost:
        block = self._blocks[op.block or 0]
        tokens = 0 if op.micro is None else self._micro_sizes[op.micro]
        match op.kind:
            case OpKind.FETCH:
                copied = self._copy("in", self._fetched_bytes(op, block))
                if self.workload.division.size > 1:
                    return copied
                return self._widened(copied, in_slot(block, self.settings))
            case OpKind.GATHER:
                return self._widened(self._collective(self._collectives.gather(block)), block)
            case OpKind.BALANCE:
                return self._collective(self._collectives.smallest())
            case OpKind.EXCHANGE:
                moved = self._collectives.exchange(block)
                added_s = self._collectives.added_seconds(block)
                return self._collective(moved, added_s)
            case OpKind.RESTORE:
                return self._copy("in", self._taped_bytes(tokens))
            case OpKind.STASH:
                return self._copy("out", self._taped_bytes(tokens))
            case OpKind.DRAIN:
                return self._drain(op, block)
            case OpKind.NORM:
                return self._norm(op, block)
            case OpKind.MOMENTUM:
                return self._momentum(block)
            case OpKind.SEND:
                return self._copy("in", self._direction_bytes(block))
            case OpKind.RETURN:
                return self._copy("out", self._direction_bytes(block))
            case OpKind.COLLECT:
                return self._collective(self._collectives.collect(block))
            case OpKind.ORTHOGONALIZE:
                return self._compute(self._orthogonalize_seconds(block))
            case OpKind.UPDATE:
                return self._update(block)
            case OpKind.READ:
                return self._disk(block, self._on_disk, self.profile.disk_read_bytes_per_s)
            case OpKind.WRITE:
                return self._disk(block, self._on_disk, self.profile.disk_write_bytes_per_s)
            case OpKind.CLIP:
                return Cost(seconds=self.profile.op_overhead_s + 2 * self._agreed_s)
        seconds = self._compute_seconds(op, block, tokens)
        cost = self._compute(max(seconds, self._issue_seconds(op, block, tokens)))
        return self._paged(cost, op, block, tokens) if op.role is Role.LAYER else cost

    # Compute.

    def _compute(self, seconds: float) -> Cost:
        """On the host's own cores, compute takes cores; its memory traffic is in its rates."""
        return Cost(seconds=seconds + self.profile.op_overhead_s, cores=self.profile.compute_cores)

    def _paged(self, cost: Cost, op: Op, block: BlockShape, tokens: int) -> Cost:
        """Return the cost of a layer's op that fetches its experts while it computes."""
        walked = walked_bytes(block, self.workload, self.settings)
        if not walked:
            return cost
        _, tiles = self._tiles(block, tokens)
        times = 2 if op.kind is OpKind.BACKWARD and not _keeps_activations(op) else 1
        inward = tiles * times * walked
        widened = tiles * times * block.widening_of_pages
        copied_s = inward / self.profile.copy_in_bytes_per_s
        in_s = copied_s + widened / self.profile.device_bytes_per_s
        seconds = max(cost.seconds, in_s)
        return replace(
            cost,
            seconds=seconds,
            num_bytes=inward,
            dram_rate=inward / seconds,
            cores=cost.cores * cost.seconds / seconds,
            link="in",
            link_share=copied_s / seconds,
            limit="" if seconds == cost.seconds else "link in",
        )

    def _compute_seconds(self, op: Op, block: BlockShape, tokens: int) -> float:
        if op.kind is OpKind.HEAD:
            twice = self.workload.projects_twice and op.trains
            first = self._head_sums_seconds(tokens) if twice else 0.0
            return first + self.head_seconds(tokens)
        if op.role is Role.EMBEDDING:
            return self._embedding_seconds(block, tokens, backward=op.kind is OpKind.BACKWARD)
        forward = self.layer_seconds(block, tokens)
        if op.kind is OpKind.FORWARD:
            return forward
        backward = self._layer_backward_seconds(block, tokens)
        recompute = 0.0 if _keeps_activations(op) else forward
        return recompute + backward + self._layer_sums(block, tokens, adds=op.adds)

    def _issue_seconds(self, op: Op, block: BlockShape, tokens: int) -> float:
        """Return how long the host takes to issue an op: a device has done it no sooner."""
        if op.role is not Role.LAYER:
            return 0.0
        forward = op.kind is OpKind.FORWARD
        profile, (_, num_tiles) = self.profile, self._tiles(block, tokens)
        return num_tiles * (profile.forward_issue_s if forward else profile.backward_issue_s)

    def layer_seconds(self, block: BlockShape, tokens: int) -> float:
        at_once, num_tiles = self._tiles(block, tokens)
        products = block.matmul_flops_per_token * tokens / self._forward_rate(at_once)
        products *= self._narrow_share(block)
        passes = self.passes(block, tokens) + (num_tiles - 1) * self.profile.op_overhead_s
        waits = num_tiles * self.profile.expert_wait_s if block.num_experts else 0.0
        return products + self.attention_seconds(block, tokens) + passes + waits

    def _layer_backward_seconds(self, block: BlockShape, tokens: int) -> float:
        at_once, num_tiles = self._tiles(block, tokens)
        flops = block.matmul_flops_per_token + block.gradient_flops_per_token
        products = flops * tokens / self._backward_rate(at_once) * self._narrow_share(block)
        if num_tiles > 1:  # what is before attention is computed once more
            before, _ = block.params_around_attention(self._width)
            products += 2.0 * before * tokens / self._forward_rate(at_once)
        passes = self.passes(block, tokens, backward=True)
        passes += (num_tiles - 1) * self.profile.op_overhead_s
        return products + self.attention_seconds(block, tokens, backward=True) + passes

    def _narrow_share(self, block: BlockShape) -> float:
        """Return the time of a layer's products over that of plain ones."""
        narrow = narrow_part(block, self.workload)
        return 1.0 - narrow + narrow / gain(self.profile, self.workload)

    def _layer_sums(self, block: BlockShape, tokens: int, *, adds: bool) -> float:
        """Return the seconds in which a layer's gradient gets into its slot, tile by tile."""
        _, num_tiles = self._tiles(block, tokens)
        more = (num_tiles - 1) * self.add_up(block, adds=True)
        return self.add_up(block, adds=adds) + more

    def _tiles(self, block: BlockShape, tokens: int) -> tuple[int, int]:
        """Return the tokens that a layer computes at once, and how often for a micro-batch."""
        return at_once(self.workload, self.settings, block, tokens)

    def attention_seconds(self, block: BlockShape, tokens: int, *, backward: bool = False) -> float:
        """Return the seconds of attention in forward, or of its part of backward."""
        attention = block.attention
        if attention is None:
            return 0.0
        flops = self.attention_flops(block, tokens)
        seconds = flops / (self._forward_rate(tokens) * self.profile.attention_efficiency)
        if backward:
            eager = self.workload.attends_eagerly(attention)
            seconds *= EAGER_BACKWARD_ATTENTION if eager else BACKWARD_ATTENTION
        return seconds + self.score_seconds(block, tokens, backward=backward)

    def attention_flops(self, block: BlockShape, tokens: int) -> float:
        """Return the FLOPs of attention in forward. Eager attention computes what a mask hides."""
        attention, workload = block.attention, self.workload
        if attention is None:
            return 0.0
        sequence = min(workload.sequence, tokens)
        masked = workload.masked or workload.attends_eagerly(attention)
        return attention.flops_per_token(sequence, masked=masked) * tokens

    def score_seconds(self, block: BlockShape, tokens: int, *, backward: bool = False) -> float:
        """Return the seconds in which scores pass through memory: a fused kernel keeps them."""
        attention, workload = block.attention, self.workload
        if attention is None or not workload.attends_eagerly(attention):
            return 0.0
        scores = attention.heads * min(workload.sequence, tokens) * tokens
        elements = BACKWARD_SCORE_ELEMENTS if backward else SCORE_ELEMENTS
        moved = elements * workload.element_bytes * scores
        return moved / self.profile.device_bytes_per_s

    def passes(self, block: BlockShape, tokens: int, *, backward: bool = False) -> float:
        """Return the seconds of forward's or backward's element-wise work."""
        workload, on_device = self.workload, not self.profile.on_host
        if on_device and (workload.compiled or workload.kernels != "none"):
            traffic = FUSED_BACKWARD if backward else FUSED
        else:
            traffic = EAGER_BACKWARD if backward else EAGER
        moved = tokens * elementwise_bytes(block, self._width, traffic)
        moved += tokens * narrowing_bytes(block, workload, backward=backward)
        shared = weight_traffic(block, workload, backward=backward)
        moved += shared / workload.num_micro(self.settings.micro_batch_tokens)
        return moved / self.profile.device_bytes_per_s

    def add_up(self, block: BlockShape, *, adds: bool) -> float:
        """Return the seconds in which a block's gradient gets into its slot."""
        params = block.trained_elements()
        grad = self.workload.element_bytes
        moved = params * (grad + 8 if adds else grad + 4)
        if self.profile.unified and not adds:
            moved = 0
        return moved / self.profile.device_bytes_per_s

    def head_seconds(self, tokens: int) -> float:
        model, profile = self.workload.model, self.profile
        flops = model.head_flops_per_token * tokens
        trains = model.trains_projection
        products = flops / self._forward_rate(tokens)
        products += (1 + trains) * flops / self._backward_rate(tokens)
        # Logits: widened, their maximum and sum taken, turned into their gradient, narrowed.
        scores = tokens * model.vocab * (4 * self.workload.element_bytes + 20)
        chunks = num_chunks(self.settings, tokens)
        added = trains * chunks * model.vocab * model.hidden * (self.workload.element_bytes + 8)
        seconds = products + (scores + added) / profile.device_bytes_per_s
        return seconds / profile.head_efficiency

    def _head_sums_seconds(self, tokens: int) -> float:
        """Return the seconds of a first pass: project, and sum up the logits."""
        model, profile = self.workload.model, self.profile
        products = model.head_flops_per_token * tokens / self._forward_rate(tokens)
        scores = tokens * model.vocab * (2 * self.workload.element_bytes + 8)
        return (products + scores / profile.device_bytes_per_s) / profile.head_efficiency

    def _embedding_seconds(self, block: BlockShape, tokens: int, *, backward: bool) -> float:
        """Look-ups move rows; on a device backward makes a gradient of the table, mostly zeros."""
        rows = 2 * tokens * self._width * self.workload.element_bytes
        table = 0
        if backward and not self.profile.unified and not row_bytes(self.workload, self.settings):
            table = block.trained_elements() * (2 * self.workload.element_bytes + 4)
        moved = (rows + table) / self.profile.device_bytes_per_s
        return moved + self._media_seconds(tokens, backward=backward)

    def _media_seconds(self, tokens: int, *, backward: bool) -> float:
        """Return the seconds of towers and projectors, for rows that have media as most."""
        media = self.workload.model.media
        if media is None:
            return 0.0
        seconds = media.forward_flops / self._forward_rate(media.item_tokens)
        if backward:
            seconds += media.backward_flops / self._backward_rate(media.item_tokens)
        return media.usual_items(tokens) * seconds

    def _forward_rate(self, tokens: int) -> float:
        return self.profile.forward_rate(self._width, tokens) * self._dtype_share

    def _backward_rate(self, tokens: int) -> float:
        return self.profile.backward_rate(self._width, tokens) * self._dtype_share

    @property
    def _dtype_share(self) -> float:
        return 1.0 if self.workload.dtype == "bf16" else self.profile.fp32_efficiency

    @property
    def _width(self) -> int:
        return self.workload.model.hidden

    # Copies.

    def _fetched_bytes(self, op: Op, block: BlockShape) -> int:
        if gathers(op, self.settings):
            return gathered_bytes(self.workload)
        return in_slot(block, self.settings).weight_bytes(self.workload.dtype, self._owned)

    def _widened(self, copied: Cost, block: BlockShape) -> Cost:
        """Return the cost of bringing a block's bytes, and of widening what is narrow of them.

        Both are on one stream. The link is free while weights are widened.
        """
        if not block.narrow_bytes:
            return copied
        seconds = copied.seconds + block.widening_traffic / self.profile.device_bytes_per_s
        share = copied.seconds / seconds
        return replace(
            copied,
            seconds=seconds,
            dram_rate=copied.dram_rate * share,
            cores=copied.cores * share,
            link_share=copied.link_share * share,
        )

    def _taped_bytes(self, tokens: int) -> int:
        return 0 if self.profile.unified else tokens * self._width * self.workload.element_bytes

    def _copy(self, way: str, num_bytes: int) -> Cost:
        """Return the cost of a copy over the link; host memory is read or written once."""
        profile = self.profile
        rate = profile.copy_in_bytes_per_s if way == "in" else profile.copy_out_bytes_per_s
        return self._transfer(num_bytes, rate, way)

    def _disk(self, block: BlockShape, kinds: Sequence[TensorKind], rate: float) -> Cost:
        """Return the cost of moving the block's `kinds`: they are hashed on the way."""
        is_fp32 = self.workload.dtype == "fp32"
        matrices = block.matrix_elements(self._owned)
        others = block.trained_elements(self._owned) - matrices
        num_bytes = others * bytes_per_param(kinds, is_fp32=is_fp32)
        num_bytes += matrices * bytes_per_param(kinds_of_matrices(kinds), is_fp32=is_fp32)
        return self._transfer(int(num_bytes), rate)

    def _transfer(self, num_bytes: int, rate: float, link: str = "") -> Cost:
        profile = self.profile
        seconds = num_bytes / rate + profile.op_overhead_s
        # Where compute is on the host's cores, a core does the copying: one that keeps up with
        # memory is busy for as long as that takes, and sleeps while a slower link is awaited.
        own = profile.compute_cores > 0
        cores = min(1.0, 4 * num_bytes / profile.dram_bytes_per_s / seconds) if own else 0.0
        return Cost(
            seconds=seconds,
            num_bytes=num_bytes,
            dram_rate=num_bytes / seconds,
            cores=cores,
            link=link,
        )

    def _drain(self, op: Op, block: BlockShape) -> Cost:
        num_bytes = block.gradient_bytes(self.workload.dtype, self._owned)
        if self.profile.unified:
            seconds = 2 * num_bytes / self.profile.device_bytes_per_s + self.profile.op_overhead_s
            return Cost(seconds=seconds, num_bytes=num_bytes, cores=self.profile.compute_cores)
        if gathers(op, self.settings):
            num_bytes = self._fetched_bytes(op, block)
        return self._copy("out", num_bytes)

    # Between ranks.

    @cached_property
    def _collectives(self) -> Collectives:
        return Collectives(self.profile, self.workload.division, self.workload.dtype)

    @property
    def _agreed_s(self) -> float:
        """Latency of a small all-gather."""
        return 0.0 if self.workload.division.is_alone else self._collectives.latency_s

    def _collective(self, moved: Collective, added_s: float = 0.0) -> Cost:
        """Return the cost of a collective, and of the sums behind it, which are compute."""
        profile = self.profile
        assert profile.network is not None
        seconds = moved.seconds + added_s + profile.op_overhead_s
        cores = profile.network.cores * moved.seconds + profile.compute_cores * added_s
        return Cost(
            seconds=seconds,
            num_bytes=moved.num_bytes,
            dram_rate=moved.dram_bytes / seconds,
            cores=cores / seconds,
            link_share=moved.link_share if profile.device_bytes else 0.0,
        )

    # Host.

    def _norm(self, op: Op, block: BlockShape) -> Cost:
        num_bytes = block.gradient_bytes(self.workload.dtype, self._owned)
        moved = 3 * num_bytes if gathers(op, self.settings) else num_bytes
        shares = arrives_in_ring(self.settings) and not op.comes_again
        shared_s = self._agreed_s if shares else 0.0
        return self._host(moved / self._update_rate + shared_s, moved, num_bytes)

    def _update(self, block: BlockShape) -> Cost:
        """Matrices that were orthogonalized have their masters read and written, no states."""
        is_fp32 = self.workload.dtype == "fp32"
        moved = block.matrix_elements(self._owned) * update_traffic((), is_fp32=is_fp32)
        return self._change(block, self._state_traffic, moved)

    def _momentum(self, block: BlockShape) -> Cost:
        """States are read and written, and so are gradients, which become directions."""
        states = kinds_of_matrices(self.workload.states[self.settings.state])
        kept = bytes_per_param(states) + TensorKind.GRAD.bytes_per_element(
            is_fp32=self.workload.dtype == "fp32"
        )
        moved = 2 * kept * block.matrix_elements(self._owned)
        return self._host(moved / self._update_rate, moved, self._direction_bytes(block))

    def _direction_bytes(self, block: BlockShape) -> int:
        return block.matrix_elements(self._owned) * self.workload.element_bytes

    def _orthogonalize_seconds(self, block: BlockShape) -> float:
        """Return the seconds of Newton-Schulz, in bf16, of the matrices that a rank has a part of.

        A step multiplies a matrix with itself, the product with itself, and that with the matrix:
        2 x small x (2 x large + small) x small FLOPs.
        """
        seconds = 0.0
        for tensor in block.matrices:
            small, large = sorted(tensor.shape[-2:])
            count = tensor.num_elements // (small * large)
            flops = NUM_PRODUCT_STEPS * 2.0 * small * small * (2 * large + small) * count
            moved = NUM_PRODUCT_STEPS * 2 * (4 * small * large + 4 * small * small) * count
            seconds += flops / self.profile.forward_rate(small, large)
            seconds += moved / self.profile.device_bytes_per_s
        return seconds / self.workload.division.size

    @property
    def _state_traffic(self) -> float:
        states = self.workload.states[self.settings.state]
        return update_traffic(states, is_fp32=self.workload.dtype == "fp32")

    def _change(self, block: BlockShape, traffic: float, of_matrices: float = 0.0) -> Cost:
        """Return the cost of an update that moves so many bytes of host memory per element.

        `of_matrices` are those of matrices with states of their own, in all.
        """
        elements = block.trained_elements(self._owned) - block.matrix_elements(self._owned)
        moved = elements * traffic + of_matrices
        num_bytes = block.gradient_bytes(self.workload.dtype, self._owned)
        return self._host(moved / self._update_rate, moved, num_bytes)

    @property
    def _update_rate(self) -> float:
        """Bytes per second of an update: the profile has that of AdamW on bf16 params."""
        return self.profile.update_params_per_s * update_traffic(ADAMW)

    def _host(self, seconds: float, moved: float, num_bytes: int) -> Cost:
        seconds += self.profile.op_overhead_s
        return Cost(
            seconds=seconds,
            num_bytes=num_bytes,
            dram_rate=moved / seconds,
            cores=self.profile.update_cores if self.profile.compute_cores else 0.0,
        )


def _keeps_activations(op: Op) -> bool:
    """Return whether backward finds the activations that forward left, and computes none again."""
    kept = ("kept", op.block, op.micro)
    return kept in op.writes or kept in op.reads


def elementwise_bytes(block: BlockShape, hidden: int, per: Traffic = EAGER) -> float:
    """Return what element-wise work reads and writes per token."""
    total = per.normed * _normed(block, hidden) + per.added * 2 * hidden
    if block.attention is not None:
        keys = block.attention.kv_heads * block.attention.head_dim
        total += per.rotated * (block.attention.query_width + keys)
    _, _, adapted = block.adapted_widths
    total += (per.gated if block.gated else per.activated) * block.inner
    return total + per.adapted * adapted


def _normed(block: BlockShape, hidden: int) -> int:
    """Return how many elements of a token its norms look at; without weights, one norm is assumed.

    The norm of a head has the weights of one, and looks at all heads of the queries or keys.
    """
    weights = [t for t in block.tensors if len(t.shape) == 1 and t.name.endswith("weight")]
    attention = block.attention
    total = 0
    for tensor in weights:
        (width,) = tensor.shape
        if attention is not None and width == attention.head_dim != hidden:
            of_keys = tensor.name.split(".")[-2].startswith("k")
            width *= attention.kv_heads if of_keys else attention.heads
        total += width
    return max(total, hidden)
