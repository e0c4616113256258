"""Towers of a joint model: media go in, and what comes out takes the place of tokens.

The merge is the model's own code: its forward calls `get_image_features` (or its like for video and
sound), puts what that returns where its tokens are, and makes masks of the types of tokens. We let
that function take one item after another and join what each gives, so that an item's features never
depend on the batch it is in, and items of any sizes go together.

Three parts of a joint model besides text, by who computes them when:

    tower       everything that is not one of the other two. Frozen, its modules are not run in a
                step: stand-ins give what they gave once, ahead of the run (`recorded`)
    projector   what makes text's hidden states of a tower's; found by its name, as there is no
                other mark. It is in the first block, frozen or trained
    loose       params of a module that has a projector as well (a newline between rows): in the
                first block too

What a module of a tower gave is kept as far as code outside towers reads it: a probe by autograd
shows which tensors that are (the last layer's, with deepstack some others). Of all others the shape
is enough.

A tower that a step runs keeps the inputs of its layers from forward to backward, as text does, and
backward computes each layer once more: its activations are those of one layer, whatever its depth.

Positions of several axes are those of the model's own `get_rope_index`, document by document.

Laws (tests/engine/test_towers.py; 2: tests/run/evaluation/test_tower_outputs.py)
    1. Loss and gradients are those of transformers' joint model, padded and packed.
    2. Features of given outputs are those of the tower that computes, bit for bit.
    3. A tower's param is in no block, and every other param is in one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from megatrain.errors import BatchError, ConfigError
from megatrain.media import TOKEN_TYPES, MediaItem, MediaKind, TowerOutputs
from megatrain.models.documents import attending_as_ever

MediaTraining = Literal["off", "frozen", "projector", "all"]
"""What of towers is trained: `off`, there are no media; nothing; their projectors; all of them."""
_PROJECTOR = re.compile(
    r"(^|\.)(\w*projector\w*|\w*projection|\w*merger\w*|connector|aligner|embed_(vision|audio))\."
)
_FEATURES: dict[MediaKind, str] = {kind: f"get_{kind}_features" for kind in TOKEN_TYPES}
_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Towers:
    """How a joint model takes media."""

    owner: str
    """The path of the module whose forward merges media and text."""
    kinds: tuple[MediaKind, ...]
    """The media that it takes."""
    modules: tuple[str, ...]
    """The paths of frozen modules that are not run in a step, in the order of the model."""

    def is_inside(self, name: str) -> bool:
        """Return whether a tensor belongs to a module that is not run."""
        return any(name.startswith(f"{path}.") for path in self.modules)


@dataclass
class Answer(ModelOutput):  # type: ignore[misc]  # its base has no types
    """The output of a tower's module, or features: every field that one has."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    hidden_states: Any = None
    attentions: Any = None
    attention_mask: Any = None
    deepstack_features: Any = None


def find_towers(
    model: PreTrainedModel, unread: Sequence[str], training: MediaTraining
) -> Towers | None:
    """Return the towers of a model; None: media are off. `unread` is what text never reads.

    Raises ConfigError if the model takes no media in a way that is known.
    """
    if training == "off":
        return None
    owners = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
        and any(_defines(module, name) for name in _FEATURES.values())
    ]
    if not owners or not unread:
        raise ConfigError(
            f"model.media is {training}: a {model.config.model_type} has no towers that are known. "
            "Set it to off, and train on text."
        )
    path, owner = owners[-1]  # a class around it hands on
    kinds = tuple(kind for kind, name in _FEATURES.items() if _defines(owner, name))
    apart = set() if training == "all" else set(unread)
    if training == "projector":
        apart = {name for name in apart if _PROJECTOR.search(name) is None}
    return Towers(owner=path, kinds=kinds, modules=tuple(_whole_modules(model, "", apart)))


def is_projector(name: str) -> bool:
    """Return whether a param that text never reads belongs to a projector, by its name."""
    return _PROJECTOR.search(name) is not None


def _defines(module: nn.Module, name: str) -> bool:
    return callable(getattr(type(module), name, None))


def _whole_modules(module: nn.Module, path: str, names: set[str]) -> Iterator[str]:
    """Yield the outermost modules that can be called, all of whose tensors are in `names`."""
    for own, child in module.named_children():
        inside = f"{path}.{own}" if path else own
        tensors = [f"{inside}.{name}" for name in child.state_dict(keep_vars=True)]
        if not names.intersection(tensors):
            continue
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if names.issuperset(tensors) and not is_list:
            yield inside
        else:
            yield from _whole_modules(child, inside, names)


def media_inputs(
    model: PreTrainedModel, towers: Towers, media: Sequence[MediaItem], types: Tensor
) -> dict[str, Any]:
    """Return the arguments by which a forward knows of media and the types of tokens."""
    takes = inspect.signature(model.get_submodule(towers.owner).forward).parameters
    # Only that they are there: the features of each item are made of the item.
    named: dict[str, Any] = {
        name: torch.empty(0) for item in media for name in item.tensors if name in takes
    }
    for name in _TYPES:
        if name in takes:
            named[name] = types
    return named


def masks_by_type(model: PreTrainedModel, towers: Towers) -> bool:
    """Return whether the model's masks depend on the types of tokens."""
    owner = model.get_submodule(towers.owner)
    takes = inspect.signature(owner.forward).parameters
    return any(name in takes for name in _TYPES) and not hasattr(owner, "get_rope_index")


def positions_by_axis(
    model: PreTrainedModel,
    towers: Towers,
    documents: Sequence[slice],
    input_ids: Tensor,
    types: Tensor,
    media: Sequence[Sequence[MediaItem]],
) -> Tensor | None:
    """Return the positions of flat tokens on each axis, (axes, tokens); None: there is one axis.

    `documents` are slices of the tokens, each with its `media`; padding, in none, is at 0.
    """
    owner = model.get_submodule(towers.owner)
    if not hasattr(owner, "get_rope_index"):
        return None
    takes = inspect.signature(owner.get_rope_index).parameters
    found: Tensor | None = None
    for document, items in zip(documents, media, strict=True):
        named: dict[str, list[Tensor]] = {}
        for item in items:
            for name in item.tensors.keys() & takes.keys():
                named.setdefault(name, []).append(item.tensors[name])
        given = {name: torch.cat(tensors) for name, tensors in named.items()}
        positions, _ = owner.get_rope_index(
            input_ids=input_ids[document][None], mm_token_type_ids=types[document][None], **given
        )
        if found is None:
            found = positions.new_zeros((len(positions), len(input_ids)))
        found[:, document] = positions[:, 0]
    return found


def sent_of(item: MediaItem) -> dict[str, Tensor]:
    """Return the tensors of an item that a step reads; pixels are not, if outputs are given."""
    if item.outputs is None:
        return dict(item.tensors)
    small = {name: one for name, one in item.tensors.items() if not one.is_floating_point()}
    return small | {f"output {n}": one for n, one in enumerate(item.outputs.tensors)}


def with_sent(item: MediaItem, there: Mapping[str, Tensor]) -> MediaItem:
    """Return an item with its tensors where they were sent; of others it has the shape alone."""
    zero = next(iter(there.values())).new_zeros(())
    tensors = {
        name: there[name] if name in there else zero.to(one.dtype).expand(one.shape)
        for name, one in item.tensors.items()
    }
    outputs = item.outputs
    if outputs is not None:
        sent = tuple(there[f"output {n}"] for n in range(len(outputs.tensors)))
        outputs = replace(outputs, tensors=sent)
    return replace(item, tensors=tensors, outputs=outputs)


@contextmanager
def media_given(
    model: PreTrainedModel, towers: Towers, media: Sequence[MediaItem]
) -> Iterator[None]:
    """Let the model's forward, run meanwhile, make its features of these items."""
    owner = model.get_submodule(towers.owner)
    own = {_FEATURES[kind]: getattr(owner, _FEATURES[kind]) for kind in towers.kinds}

    def features_of(kind: MediaKind) -> Callable[..., Any]:
        items = [item for item in media if item.kind == kind]

        def features(*_: Any, **__: Any) -> ModelOutput:
            with ExitStack() as stack:
                for name, function in own.items():  # one may call another
                    stack.enter_context(_replaced(owner, name, function))
                function = own[_FEATURES[kind]]
                return _joined([_features(model, towers, function, item) for item in items])

        return features

    with ExitStack() as stack:
        for kind in {item.kind for item in media}:
            if kind not in towers.kinds:
                raise BatchError(f"a {model.config.model_type} takes no {kind}")
            stack.enter_context(_replaced(owner, _FEATURES[kind], features_of(kind)))
        yield


def given_features(model: PreTrainedModel, towers: Towers, kind: MediaKind) -> dict[str, Any]:
    """Return what the merge reads of the given media of one kind, inside of `media_given`."""
    features = getattr(model.get_submodule(towers.owner), _FEATURES[kind])
    return _kept_fields(features())


def _features(
    model: PreTrainedModel, towers: Towers, own: Callable[..., Any], item: MediaItem
) -> Any:
    """Return what `own`, the model's function, makes of one item."""
    takes = inspect.signature(own).parameters
    named = {name: tensor for name, tensor in item.tensors.items() if name in takes}
    if item.outputs is None:
        if towers.modules:  # a step has no weights of theirs
            raise BatchError(
                f"the towers are frozen, and a {item.kind} has no outputs of theirs: give its item "
                "with outputs=recorded(...), or load the model with media='all'"
            )
        with attending_as_ever(), _layers_computed_again(model, towers):
            return own(**named, return_dict=True)
    left = iter(item.outputs.structure)
    with ExitStack() as stack, attending_as_ever():
        for path in towers.modules:

            def answer(
                *_: Any, path: str = path, outputs: TowerOutputs = item.outputs, **__: Any
            ) -> Any:
                called, form = next(left, (None, None))
                assert called == path, f"{path} is called where {called} was"
                return _rebuilt(form, outputs.tensors)

            stack.enter_context(_replaced(model.get_submodule(path), "forward", answer))
        return own(**named, return_dict=True)


@contextmanager
def _layers_computed_again(model: PreTrainedModel, towers: Towers) -> Iterator[None]:
    """Let the layers of towers keep their input alone; backward computes each once more.

    Params are those that are there now: when backward runs, the model has them no more.
    """
    with ExitStack() as stack:
        for layer in _tower_layers(model, towers) if torch.is_grad_enabled() else ():
            stack.enter_context(_replaced(layer, "forward", _computed_again(layer)))
        yield


def _computed_again(layer: nn.Module) -> Callable[..., Any]:
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        params: dict[str, Tensor] = dict(layer.named_parameters())

        def run(*args: Any, **kwargs: Any) -> Any:
            with _replaced(layer, "forward", own):
                return functional_call(layer, params, args, kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return forward


def _tower_layers(model: PreTrainedModel, towers: Towers) -> Iterator[nn.Module]:
    """Yield the members of lists outside of text: the layers of towers, and what is beside them."""
    seen = set(model.get_decoder().modules())
    for module in model.get_submodule(towers.owner).modules():
        if isinstance(module, nn.ModuleList) and module not in seen:
            yield from module
            seen.update(module.modules())  # lists inside of a layer are its own


def recorded(model: PreTrainedModel, towers: Towers, item: MediaItem) -> TowerOutputs:
    """Return what the frozen modules of the towers give for an item.

    They have their weights; params outside may be zeros: it only shows what is read.
    """
    calls: list[tuple[str, Any]] = []
    leaves: list[Tensor] = []
    own = getattr(model.get_submodule(towers.owner), _FEATURES[item.kind])
    takes = inspect.signature(own).parameters
    named = {name: tensor for name, tensor in item.tensors.items() if name in takes}

    def recording(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                output = forward(*args, **kwargs)
            calls.append((path, _form(output, leaves)))
            # Views: code may write into what it gets.
            return _rebuilt(calls[-1][1], [leaf.view_as(leaf) for leaf in leaves])

        return run

    with ExitStack() as stack:
        for path in towers.modules:
            module = model.get_submodule(path)
            stack.enter_context(_replaced(module, "forward", recording(path, module.forward)))
        with torch.enable_grad():
            read = _read(_kept_fields(own(**named, return_dict=True)), leaves)
    kept = [number for number, is_read in enumerate(read) if is_read]
    structure = [[path, _renumbered(form, kept, leaves)] for path, form in calls]
    return TowerOutputs(structure=structure, tensors=tuple(leaves[n].detach() for n in kept))


def _kept_fields(output: Any) -> dict[str, Any]:
    """Return what a merge reads of a tower's output."""
    if getattr(output, "pooler_output", None) is None:
        return {"last_hidden_state": output.last_hidden_state}
    names = ("pooler_output", "deepstack_features", "attention_mask")
    found = {name: getattr(output, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _joined(outputs: Sequence[Any]) -> ModelOutput:
    """Return the features of several items as if a tower had had them together."""
    fields = [_kept_fields(output) for output in outputs]
    joined = Answer()
    for name in fields[0]:
        parts = [one[name] for one in fields]
        if name == "deepstack_features":  # by level, each as features are
            value: Any = [_side_by_side(list(level)) for level in zip(*parts, strict=True)]
        else:
            value = _side_by_side(parts, padded="attention_mask" in fields[0])
        setattr(joined, name, value)
    return joined


def _side_by_side(parts: list[Any], *, padded: bool = False) -> Any:
    """Return a list of all items, or their tensors as one."""
    if not isinstance(parts[0], Tensor):
        return [one for part in parts for one in part]
    if padded and parts[0].dim() > 1:
        longest = max(part.shape[1] for part in parts)
        behind = [[0, 0] * (part.dim() - 2) + [0, longest - part.shape[1]] for part in parts]
        parts = [F.pad(part, pad) for part, pad in zip(parts, behind, strict=True)]
    return torch.cat(parts)


def _form(value: Any, leaves: list[Tensor]) -> Any:
    """Return a module's output with numbers in place of its tensors, which go to `leaves`."""
    if isinstance(value, Tensor):
        leaves.append(value.detach().requires_grad_(value.is_floating_point()))
        return {"tensor": len(leaves) - 1}
    if isinstance(value, ModelOutput):
        return {"fields": {name: _form(one, leaves) for name, one in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [_form(one, leaves) for one in value]}
    assert value is None or isinstance(value, bool | int | float), f"a tower gives {type(value)}"
    return {"value": value}


def _rebuilt(form: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a module's output of its form; a tensor that nothing reads has its shape alone."""
    ((kind, value),) = form.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "shape":
        shape, dtype = value
        like = tensors[0] if tensors else torch.empty(0)
        return like.new_zeros((), dtype=getattr(torch, dtype)).expand(shape)
    if kind == "list":
        return tuple(_rebuilt(one, tensors) for one in value)
    if kind == "fields":
        return Answer(**{name: _rebuilt(one, tensors) for name, one in value.items()})
    return value


def _renumbered(form: Any, kept: Sequence[int], leaves: Sequence[Tensor]) -> Any:
    """Return a form that refers to the kept tensors alone."""
    ((kind, value),) = form.items()
    if kind == "tensor":
        if value in kept:
            return {"tensor": kept.index(value)}
        leaf = leaves[value]
        return {"shape": [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")]}
    if kind == "list":
        return {"list": [_renumbered(one, kept, leaves) for one in value]}
    if kind == "fields":
        return {"fields": {name: _renumbered(one, kept, leaves) for name, one in value.items()}}
    return form


def _read(features: Mapping[str, Any], leaves: Sequence[Tensor]) -> list[bool]:
    """Return which tensors features are made of. Numbers and masks count as read."""
    made = [one for one in tree_leaves(dict(features)) if isinstance(one, Tensor)]
    outputs = [one.sum() for one in made if one.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, allow_unused=True) if outputs else ())
    return [not leaf.requires_grad or next(found, None) is not None for leaf in leaves]


@contextmanager
def _replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of a module's own."""
    before = module.__dict__.get(name)
    module.__dict__[name] = function
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before
