"""Laws of pages.py: experts in pages are the experts, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.engine.pages import ExpertPages, Key, PageRing
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.models.build import build_decoder
from megatrain.models.decoder import has_experts
from megatrain.step.ops import OpKind
from testkit.families import FAMILIES, tiny_config
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, Outcome, Sort, World, make_batch

NUM_LAYERS, NUM_EXPERTS = 3, 5
CHANGES: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), NUM_EXPERTS),
}
FEW = ["mixtral", "gpt_oss", "deepseek_v3"]
"""The first mixtures; transposed weights with biases; a dense layer below, and shared experts."""
ROWS = ((1, 6), (2, 5))
STEPS = (ROWS, ((1, 9),), ROWS)


@functools.cache
def world_of(family: str, dtype: Any = "bf16", *, frozen: bool = False) -> World:
    few = family in FEW
    pattern = ("*experts*",) if frozen else ()
    config = tiny_config(family, **(CHANGES if few else {}))
    return World(Sort(config=lambda: config, dtype=dtype, frozen=pattern))


def whole(world: World, case: Case) -> Outcome:
    """What the case gives with experts in slots, one op at a time."""
    return _played(world, replace(case, expert_pages=1))


@functools.cache
def _played(world: World, case: Case) -> Outcome:
    return world.play(case, reference=True)


def case_of(**changes: Any) -> Case:
    fields: dict[str, Any] = {"sort": "", "steps": STEPS, "update": "late", "expert_pages": 2}
    return Case(**fields | changes)


@functools.cache
def mixtures() -> list[str]:
    """The families whose experts come in pages."""
    return [f for f in FAMILIES if has_experts(build_decoder(tiny_config(f), "bf16").model)]


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FEW)
def test_pages_of_any_size_give_the_bits_of_the_whole_block(family: str, dtype: str) -> None:
    world = world_of(family, dtype)
    for num_pages in (2, 3, 9):
        case = case_of(expert_pages=num_pages)
        assert world.play(case).differences(whole(world, case)) == [], num_pages


@pytest.mark.merge
@pytest.mark.parametrize("update", ["none", "late"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_so_in_every_mixture(family: str, dtype: str, update: Any) -> None:
    if family not in mixtures():
        pytest.skip("no experts, or a code that does not multiply by groups of rows")
    world = world_of(family, dtype)
    for num_pages in (2, 3, 64):
        case = case_of(update=update, expert_pages=num_pages)
        expected = whole(world, case)
        assert world.play(case).differences(expected) == [], num_pages
        assert world.play(case, reference=True).differences(expected) == [], num_pages


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "changes",
    [
        {"update": "in_backward"},
        {"update": "second_backward"},
        {"tile_tokens": 4},
        {"kept_layers": 2},
        {"tape": "host"},
        {"tier": "states"},
        {"grad_slots": 1, "slots": 3},
        {"evaluates_after": (0, 1)},
        {"form": "packed"},
    ],
    ids=str,
)
def test_pages_go_with_all_else(changes: dict[str, Any]) -> None:
    world, case = world_of("mixtral"), case_of(expert_pages=3, **changes)
    assert world.play(case).differences(whole(world, case)) == []


def test_frozen_experts_come_in_pages_and_have_no_gradient() -> None:
    world, case = world_of("mixtral", frozen=True), case_of(expert_pages=3)
    assert world.play(case).differences(whole(world, case)) == []


@pytest.mark.parametrize("groups", [True, False], ids=["one call a page", "a loop over experts"])
def test_a_device_with_a_kernel_for_groups_and_one_without(
    groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, case = world_of("gpt_oss"), case_of(steps=(((2, 15),),), expert_pages=2)
    expected = whole(world, case)
    monkeypatch.setattr(CpuDevice, "groups", lambda self, dtype: groups)
    with Calls() as calls:  # type: ignore[no-untyped-call]
        assert world.play(case, reference=True).differences(expected) == []
    forward, recompute, of_rows, of_weights = 2, 2, 2, 2
    each = forward + recompute + of_rows + of_weights
    assert calls.number == (2 * each * NUM_LAYERS if groups else 0)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of groups."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._grouped_mm.default
        return func(*args, **kwargs or {})


def _left_out(pages: ExpertPages, *args: Any, **kwargs: Any) -> Iterator[tuple[range, Tensor]]:
    for number, page in enumerate(WALK(pages, *args, **kwargs)):
        if number != 1:
            yield page


def _twice(pages: ExpertPages, *args: Any, **kwargs: Any) -> Iterator[tuple[range, Tensor]]:
    for page in WALK(pages, *args, **kwargs):
        yield page
        if kwargs.get("back"):
            yield page


WALK = ExpertPages.walk


@pytest.mark.parametrize("broken", [_left_out, _twice], ids=lambda one: str(one.__name__))
def test_a_page_left_out_or_computed_twice_would_be_noticed(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of("mixtral", "fp32")
    case = case_of(update="none", expert_pages=2)
    expected = whole(world, case)
    monkeypatch.setattr(ExpertPages, "walk", broken)
    with suppress(RuntimeError):  # a sum of which a page is missing has not the size of its place
        assert world.play(case).differences(expected) != []


def test_the_device_has_two_pages_of_experts_and_no_more() -> None:
    world = world_of("mixtral")
    sizes: dict[str, int] = {}

    class Noting(CpuDevice):
        def allocate(self, num_bytes: int, purpose: str) -> Tensor:
            sizes[purpose] = sizes.get(purpose, 0) + num_bytes
            return super().allocate(num_bytes, purpose)

    experts = [p for p in world.decoder.blocks[1].params if len(p.shape) == 3]
    rest = sum(p.num_elements for p in world.decoder.blocks[1].params) - sum(
        p.num_elements for p in experts
    )
    for num_pages in (NUM_EXPERTS, 10 * NUM_EXPERTS):
        sizes.clear()
        case = case_of(expert_pages=num_pages)
        with world.engine(case, device=Noting(copying=True)):
            pass
        largest = max(param.num_elements // NUM_EXPERTS for param in experts)
        assert sizes["expert pages"] == 2 * 2 * largest
        edges = sum(p.num_elements for b in (0, -1) for p in world.decoder.blocks[b].params)
        assert sizes["weight slots"] < 2 * (2 * (rest + 2000) + edges + 2000)


def test_the_host_waits_once_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    world, case = world_of("mixtral"), case_of(expert_pages=4)
    asked: list[int] = []
    read = CpuDevice.read

    def counted(device: CpuDevice, tensor: Tensor) -> Tensor:
        asked.append(1)
        return read(device, tensor)

    monkeypatch.setattr(CpuDevice, "read", counted)
    with world.engine(case) as engine:
        engine.step(make_batch(ROWS, seed=0))
    assert len(asked) == 2 * NUM_LAYERS * len(ROWS), "in forward and in recompute"


def test_a_page_without_rows_is_not_fetched_and_its_gradient_is_zero() -> None:
    """Three tokens have six experts at most, of sixteen, and each expert is a page."""
    config = tiny_config("mixtral", num_hidden_layers=1, num_local_experts=16, num_experts=16)
    world = World(Sort(config=lambda: config))
    case = case_of(update="none", steps=(((1, 3),),), expert_pages=16)
    fetched: list[Key] = []

    class Noting(PageRing):
        def take(self, key: Key) -> Tensor:
            fetched.append(key)
            return super().take(key)

    expected = whole(world, case)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("megatrain.engine.pages.PageRing", Noting)
        assert world.play(case).differences(expected) == []
    touched = {key.number for key in fetched}
    assert 2 <= len(touched) <= 6
    name = next(key.name for key in fetched if key.name.endswith("down_proj"))
    gradient = world.store.param(name, TensorKind.GRAD)
    trained = {n for n in range(16) if gradient[n].count_nonzero()}
    assert trained
    assert trained <= touched  # the last token predicts nothing: its experts have zeros, too


def test_bytes_on_the_link_are_counted_by_compute() -> None:
    world, case = world_of("mixtral"), case_of(update="none", expert_pages=2)
    with world.engine(case, trace=True) as engine:
        engine.step(make_batch((((2, 15)),), seed=0))
        assert engine.trace is not None
        spans = [span for span in engine.trace.spans if span.awaited is None]
    layer = [s for s in spans if s.op.block == 2]
    experts = sum(2 * p.num_elements for p in world.decoder.blocks[2].params if len(p.shape) == 3)
    (forward,) = [s.num_bytes for s in layer if s.op.kind is OpKind.FORWARD]
    (backward,) = [s.num_bytes for s in layer if s.op.kind is OpKind.BACKWARD]
    assert forward == experts
    assert 2 * experts <= backward <= 2 * experts + experts  # one page at most in vain


@pytest.mark.merge
@pytest.mark.parametrize("policy", ["late", "early", "random"])
def test_no_race_over_pages(policy: Any) -> None:
    world, case = world_of("gpt_oss"), case_of(expert_pages=3)
    expected = whole(world, case)
    simulator = Simulator(1, policy)
    with watched(simulator):
        device = AcceleratorDevice(simulator, piece_bytes=4096, ring_buffer_bytes=1000)
        assert world.play(case, device=device, lanes=None).differences(expected) == []
    assert simulator.races == []
    assert simulator.failures == []


def _forgets_readers(ring: PageRing) -> None:
    RELEASE(ring)
    ring._read = [None] * len(ring._read)


def _forgets_copies(ring: PageRing, key: Key) -> Tensor:
    ring._coming = type(ring._coming)(replace(page, copied=None) for page in ring._coming)
    return TAKE(ring, key)


RELEASE, TAKE = PageRing.release, PageRing.take


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "broken"), [("release", _forgets_readers), ("take", _forgets_copies)]
)
def test_a_wait_that_a_page_lacks_is_a_race(
    method: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageRing, method, broken)
    world, case = world_of("mixtral"), case_of(expert_pages=3)
    simulator = Simulator(1, "late")
    with watched(simulator):
        world.play(case, device=AcceleratorDevice(simulator), lanes=None)
    assert simulator.races != []


def _refusal(world: World, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused, world.engine(case_of(), **changes):
        pass
    return str(refused.value)


def test_what_pages_do_not_go_with_is_refused_by_name() -> None:
    mixtral, llama = world_of("mixtral"), world_of("llama")
    assert "nothing is fetched" in _refusal(mixtral, device=CpuDevice())
    assert "train.compile to false" in _refusal(mixtral, compile=True)
    assert "the code of llama does not multiply by groups of rows" in _refusal(llama)
    assert "must be at least 1" in _refusal(mixtral, expert_pages=0)
