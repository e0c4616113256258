"""Laws of regions.py: one graph per structure, the bits of the uncompiled layer, nobody else's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megatrain import choices, load_model
from megatrain.devices.device import CpuDevice
from megatrain.engine import machine
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.models import compiled as regions
from megatrain.models.build import build_decoder
from megatrain.models.compiled import Backend, Regions, representatives
from megatrain.models.decoder import COMPUTE_DTYPES
from megatrain.models.documents import attending
from megatrain.models.template import Template
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import M, V
from testkit.cases import at_a_push
from testkit.engines import make_engine
from testkit.families import save_tiny, tiny_config, tiny_model
from testkit.plain import flat_row, make_batch

FAMILIES = {"llama": 1, "gemma2": 2, "mixtral": 1, "qwen3": 1}
"""With how many structures."""
BREAKS_GRAPHS = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10 breaks graphs at experts, and names no limit"
)
WHY_NOT = choices.why_not_compiled()
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        # torch's own: of transformers' experts, when inductor is imported, where a graph breaks
        "Dynamo detected a call to a `functools.lru_cache`:UserWarning",
        "`torch.jit.script_method` is deprecated:DeprecationWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
] + [pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)]


class Counter:
    """A backend that compiles nothing and counts graphs."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.num_graphs += 1
        return graph.forward


class World:
    """A plain model with weights, and its layers by way of a template."""

    def __init__(
        self,
        family: str,
        num_layers: int = 4,
        dtype: Literal["bf16", "fp32"] = "bf16",
        **changes: Any,
    ) -> None:
        changes |= {"num_hidden_layers": num_layers} if family != "gpt2" else {}
        self.plain = tiny_model(family, COMPUTE_DTYPES[dtype], **changes).train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in self.plain.parameters():
                param.add_(torch.randn(param.shape, generator=generator) * 0.05)
        self.decoder = build_decoder(tiny_config(family, **changes), dtype)

    def weights(self, block: int, grad: bool = False) -> dict[str, Tensor]:
        params = self.decoder.blocks[block].params
        given = {param.name: self.plain.get_parameter(param.name).detach() for param in params}
        return {name: weight.requires_grad_(grad) for name, weight in given.items()}

    def template(self, backend: Backend | None = None) -> Template:
        if backend is None:
            return Template(self.decoder)
        return Template(self.decoder, compile=True, backend=backend)

    def run(
        self,
        template: Template,
        *,
        grad: bool = True,
        shape: tuple[int, int] = (2, 9),
        seed: int = 0,
    ) -> list[Tensor]:
        """Return each layer's output and, if asked for, its gradients."""
        ids = torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            hidden, calls = template.front(self.weights(0), {"input_ids": ids})
        found = []
        for block, call in enumerate(calls, 1):
            torch.manual_seed(100 * seed + block)
            weights = self.weights(block, grad)
            given = hidden.detach().requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                output = template.routed_layer(weights, given, call)[0]
            hidden = output.detach()
            found.append(hidden)
            if grad:
                d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(block))
                wanted = [*weights.values(), given]
                found += torch.autograd.grad(output, wanted, d_output.to(output.dtype))
        return found


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in layer.named_parameters()}


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


def close(one: Tensor, two: Tensor, tolerance: float = 0.03) -> bool:
    """Return whether tensors differ by less than a part of the largest value."""
    one, two = one.float(), two.float()
    return bool((one - two).abs().max() <= tolerance * one.abs().max())


@functools.cache
def world_of(family: str, num_layers: int = 4) -> World:
    return World(family, num_layers)


@pytest.fixture(autouse=True)
def _a_fresh_compiler() -> Any:
    yield
    torch._dynamo.reset()


# Law 1: the number of graphs does not grow with the number of layers.


@pytest.mark.merge
def test_six_layers_have_the_graphs_of_one() -> None:
    counts = []
    for num_layers in (1, 6):
        counter = Counter()
        world = world_of("llama", num_layers)
        template = world.template(counter)
        world.run(template, grad=False)
        assert counter.num_graphs == 1
        world.run(template)
        counts.append(counter.num_graphs)
    assert counts == [2, 2], "one without gradients, one with"


@BREAKS_GRAPHS
@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_graphs_of_its_structures(family: str) -> None:
    counter, world = Counter(), world_of(family)
    template = world.template(counter)
    world.run(template)
    assert counter.num_graphs == FAMILIES[family]
    world.run(template)
    assert counter.num_graphs == FAMILIES[family], "and keeps them"


@BREAKS_GRAPHS
def test_routers_are_heard_in_compiled_layers_and_cost_no_graph() -> None:
    """Hooks differ from layer to layer in nothing but their numbers."""
    world, counter, found = world_of("mixtral"), Counter(), []
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(2))
    for compiles in (False, True):
        template = Template(world.decoder, compile=compiles, backend=counter, routed=True)
        heard: list[Tensor] = []
        with torch.no_grad():
            hidden, calls = template.front(world.weights(0), {"input_ids": ids})
            for block, call in enumerate(calls, 1):
                hidden, logits = template.routed_layer(world.weights(block), hidden, call)
                heard += logits
        found.append([*heard, hidden])
    assert [tuple(one.shape) for one in found[0][:-1]] == [(18, 4)] * 4
    assert same(*found)
    assert counter.num_graphs == FAMILIES["mixtral"]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [0, 0, 0, 0]),
        ("gemma2", [0, 1, 0, 1]),  # sliding and full attention
        ("deepseek_v3", [0, 1, 1, 1]),  # experts or none
        ("smollm3", [0, 0, 0, 3]),  # positions or none
        ("diffllama", [0, 1, 2, 3]),  # a constant that depends on the depth
    ],
)
def test_layers_of_equal_structure_share_a_region(family: str, expected: list[int]) -> None:
    layers = build_decoder(tiny_config(family), "bf16").layers
    assert representatives(list(layers)) == expected


@pytest.mark.merge
def test_the_second_length_brings_a_graph_for_all_lengths() -> None:
    counter, world = Counter(), world_of("llama")
    template = world.template(counter)
    counts = []
    for length in (9, 11, 13, 16, 30, 17):
        world.run(template, shape=(2, length))
        counts.append(counter.num_graphs)
    assert counts == [1, 2, 2, 2, 2, 2]
    for rows in (3, 4, 5):
        world.run(template, shape=(rows, 20))
        counts.append(counter.num_graphs)
    assert counts[-3:] == [3, 3, 3]


def test_structures_do_not_learn_each_others_sizes() -> None:
    """A weight whose size differs between structures is of a fixed size in each."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(8, width)

        def forward(self, hidden: Tensor) -> Tensor:
            inner: Tensor = self.inner(hidden)
            return hidden + inner.sum(-1, keepdim=True)

    shapes: list[list[tuple[Any, ...]]] = []

    def look(graph: Any, inputs: list[Tensor]) -> Any:
        shapes.append([tuple(given.shape) for given in inputs if isinstance(given, Tensor)])
        return graph.forward

    layers = [Layer(width) for width in (3, 4, 5, 3)]
    compiled = Regions(layers, look)
    for index, layer in enumerate(layers):
        compiled.call(index, weights_of(layer), torch.ones(2, 8), (), {})
    assert len(shapes) == 3
    assert all(type(size) is int for graph in shapes for shape in graph for size in shape)


# Law 2: the bits of the uncompiled layer.


@pytest.mark.merge
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.night), "aot_eager"])
@pytest.mark.parametrize("family", at_a_push(list(FAMILIES), 1))
def test_outputs_and_gradients_are_those_of_the_uncompiled_layers(
    family: str, backend: str
) -> None:
    world = world_of(family)
    plain, compiled = world.template(), world.template(backend)
    for grad in (False, True):
        assert same(world.run(compiled, grad=grad), world.run(plain, grad=grad))
    if family == "llama":  # and of any length
        assert same(world.run(compiled, shape=(2, 14)), world.run(plain, shape=(2, 14)))


def test_dropout_draws_the_same_numbers_and_evaluation_none() -> None:
    world = World("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)
    plain, compiled = world.template(), world.template("eager")
    assert same(world.run(compiled), world.run(plain))
    trained = world.run(compiled, grad=False)
    world.decoder.model.eval()
    evaluated = world.run(compiled, grad=False)
    assert same(evaluated, world.run(plain, grad=False))
    assert not same(evaluated, trained)


@pytest.mark.merge
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_recompute_draws_what_forward_drew(backend: str) -> None:
    """Not to the bit: these backends divide by the rate elsewhere than torch's dropout does."""
    world = World("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)
    template = world.template(backend)
    forward = world.run(template, grad=False)
    # Of each layer: its output, and the gradient of what it was given.
    like_output = [found for found in world.run(template) if found.shape == forward[0].shape]
    assert [close(*pair) for pair in zip(forward, like_output[::2], strict=True)] == [True] * 4
    assert not close(forward[0], world.run(template, grad=False, seed=1)[0])


@pytest.mark.merge
@pytest.mark.parametrize(
    ("family", "copying", "lengths"),
    [("llama", False, (24,)), ("llama", True, (24, 17)), ("gemma2", True, (24,))],
)
def test_an_engine_trains_to_the_same_bits(
    family: str,
    copying: bool,
    lengths: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [(2, length) for length in lengths]
    save_tiny(tmp_path, family)
    counter = Counter()
    monkeypatch.setattr(machine, "Template", functools.partial(Template, backend=counter))
    results = []
    for is_compiled in (False, True):
        model = load_model(tmp_path)
        optimizer = AdamW(learning_rate=1e-2)
        with make_engine(
            model.decoder,
            model.store,
            optimizer=optimizer,
            device=CpuDevice(copying=copying),
            compile=is_compiled,
        ) as engine:
            losses = [engine.step(make_batch(shapes, seed=seed)).micro_losses for seed in (1, 2)]
            evaluated = engine.evaluate(make_batch(shapes[:1]))
        arenas = [model.store.arena(kind).clone() for kind in (TensorKind.HI, TensorKind.LO, M, V)]
        results.append((losses, evaluated, arenas))
        assert (counter.num_graphs > 0) == is_compiled
    (losses, evaluated, arenas), compiled = results
    assert compiled[0] == losses
    assert compiled[1] == evaluated
    assert same(compiled[2], arenas)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_inductor_is_close(family: str) -> None:
    world = World(family, 2, "fp32")
    expected, found = world.run(world.template()), world.run(world.template("inductor"))
    assert all(close(one, two, 1e-5) for one, two in zip(expected, found, strict=True))
    assert not same(expected, found), "the kernels are others"


def test_a_python_that_hides_changes_from_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 3.13.0 an evaluation had the dropout of training, with torch 2.9."""
    monkeypatch.setattr(choices, "why_not_compiled", lambda: "this Python hides changes")
    with pytest.raises(ConfigError, match=r"hides changes\. Upgrade, or set train\.compile to "):
        World("llama").template("eager")


def test_the_reason_is_of_this_python_with_this_torch() -> None:
    why = choices.compiler_fault
    assert why((3, 13, 0), "2.13.0").startswith("Python 3.13.0 does not tell torch")
    assert why((3, 14, 2), "2.9.1+cpu") == (
        "torch 2.9.1+cpu cannot compile on Python 3.14; torch 2.10 can"
    )
    found = {why(*pair) for pair in (((3, 13, 1), "2.9.0"), ((3, 14, 0), "2.10.0"))}
    assert found == {""}


# Law 3: no layer computes with another's weights, buffers or number.


class Odd(nn.Module):
    """A layer whose result depends on a buffer and, if asked for, on its number."""

    table: Tensor
    scale: float
    window: list[int]
    act: Callable[..., Tensor]

    def __init__(self, index: int, uses_number: bool) -> None:
        super().__init__()
        self.layer_idx, self.uses_number = index, uses_number
        self.weight = nn.Parameter(torch.full((4,), 10.0**index))
        self.register_buffer("table", torch.full((4,), float(index)))

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        hidden = hidden * self.weight + self.table
        return (hidden + self.layer_idx if self.uses_number else hidden), None


@pytest.mark.parametrize("uses_number", [False, True])
def test_each_layer_has_its_own_weights_buffers_and_number(uses_number: bool) -> None:
    layers, counter = [Odd(index, uses_number) for index in range(4)], Counter()
    compiled = Regions(layers, counter)
    hidden = torch.ones(2, 4)
    assert representatives(layers) == [0, 0, 0, 0]
    for index, layer in enumerate(layers):
        found, _ = compiled.call(index, weights_of(layer), hidden, (), {})
        assert torch.equal(found, layer(hidden)[0])
    assert counter.num_graphs == (4 if uses_number else 1)
    assert [layer.layer_idx for layer in layers] == [0, 1, 2, 3]
    layers[3].table = torch.full((4,), 7.0)
    found, _ = compiled.call(3, weights_of(layers[3]), hidden, (), {})
    assert torch.equal(found, layers[3](hidden)[0]), "a buffer that was replaced"


def test_numbers_are_restored_when_a_call_fails() -> None:
    layers = [Odd(index, uses_number=True) for index in range(3)]
    compiled = Regions(layers, "eager")
    with pytest.raises(RuntimeError):
        compiled.call(2, weights_of(layers[2]), torch.ones(2, 5), (), {})
    assert [layer.layer_idx for layer in layers] == [0, 1, 2]


def _set(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda layer: setattr(layer, name, value)


@pytest.mark.parametrize(
    "change",
    [
        _set("scale", 2.0),
        _set("scale", -0.0),
        _set("scale", 0),
        _set("window", [8, None]),
        _set("extra", torch.zeros(4)),
        _set("act", functools.partial(torch.nn.functional.gelu, approximate="none")),
        _set("training", False),
        _set("weight", nn.Parameter(torch.zeros(5))),
        _set("weight", nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))),
        _set("table", torch.zeros(4, 1)),
        _set("inner", nn.ReLU(inplace=True)),
        _set("inner", nn.SiLU()),
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.inner.register_parameter("bias", nn.Parameter(torch.zeros(1))),
    ],
)
def test_a_difference_makes_two_structures(change: Callable[[nn.Module], None]) -> None:
    layers = [Odd(index, uses_number=False) for index in range(3)]
    for layer in layers:
        layer.scale, layer.window, layer.inner = 0.0, [8, 16], nn.ReLU()
        layer.act = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    assert representatives(layers) == [0, 0, 0]
    change(layers[1])
    assert representatives(layers) == [0, 1, 0]


# Cost and failure.


def test_without_compile_torch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr("megatrain.models.compiled.Regions", refuse)
    world = world_of("llama")
    world.run(world.template())


class Loop(nn.Module):
    """A layer whose graph depends on the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor) -> Tensor:
        for token in range(hidden.shape[0]):
            hidden = hidden + token * self.weight
        return hidden


@BREAKS_GRAPHS
def test_a_region_with_too_many_graphs_warns_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "MAX_GRAPHS", 3)
    layers, counter = [Loop(), Loop()], Counter()
    compiled = Regions(layers, counter)

    def check(length: int) -> None:
        hidden = torch.ones(length, 4)
        found, _ = compiled.call(1, weights_of(layers[1]), hidden, (), {})
        assert torch.equal(found, layers[1](hidden))

    for length in (2, 3, 4):
        check(length)
    with pytest.warns(UserWarning, match=r"layer 0 \(Loop\).* has 3 graphs.*run uncompiled"):
        check(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (6, 2, 7):
            check(length)
    assert counter.num_graphs == 3


def test_a_backend_that_fails_is_named_with_the_way_out() -> None:
    def fail(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no compiler found")

    world = world_of("llama")
    text = r"cannot compile layer 0 \(LlamaDecoderLayer\)(?s:.*)no compiler(?s:.*)Set train.compile"
    with pytest.raises(ConfigError, match=text):
        world.run(world.template(fail), grad=False)


FLAT: tuple[tuple[int, ...], ...] = ((9, 20), (9, 14, 20), (5, 7, 3, 2), (24,), (9, 14, 20))
"""Lists of lengths; some are longer than the window of 16."""


def _flat(world: World, template: Template, lengths: tuple[int, ...]) -> list[Tensor]:
    """Return the output and the gradients of each layer for documents in one row."""
    micro, found = flat_row(lengths), list[Tensor]()
    with attending(micro.packed_documents()):
        with torch.no_grad():
            hidden, calls = template.front(world.weights(0), micro.inputs)
        for block, call in enumerate(calls, 1):
            weights = world.weights(block, grad=True)
            given = hidden.detach().requires_grad_()
            output = template.routed_layer(weights, given, call)[0]
            hidden = output.detach()
            inputs = [given, *weights.values()]
            found += [hidden, *torch.autograd.grad(output, inputs, torch.ones_like(output))]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma3_text"])
def test_documents_are_attended_to_alone_by_one_graph_for_all_lengths(family: str) -> None:
    counter = Counter()
    world = World(family, num_layers=2)
    plain, compiled = world.template(), world.template(counter)
    nums_graphs = []
    for lengths in FLAT:
        assert same(_flat(world, plain, lengths), _flat(world, compiled, lengths))
        nums_graphs.append(counter.num_graphs)
    assert nums_graphs[1:] == nums_graphs[1:2] * (len(FLAT) - 1)


def test_documents_in_a_graph_that_are_others_would_be_noticed() -> None:
    world = World("llama", num_layers=1)
    compiled = world.template(Counter())
    assert not same(_flat(world, compiled, (9, 20)), _flat(world, compiled, (20, 9)))


@pytest.mark.merge
def test_documents_go_back_through_graphs_of_autograd() -> None:
    world = World("llama", num_layers=1)
    found = _flat(world, world.template("aot_eager"), (9, 14, 20))
    assert same(_flat(world, world.template(), (9, 14, 20)), found)
