"""Towers of a joint model: media go in, and what comes out takes the place of tokens.

The merge is the model's own code: its forward calls `get_image_features` (or its like for video and
sound), puts what that returns where its tokens are, and makes masks of the types of tokens. We let
that function take one item after another and join what each gives, so that an item's features never
depend on the batch it is in, and items of any sizes go together.

Towers and the projectors behind them, which make text's hidden states of a tower's, are in the
first block, frozen or trained. A projector is found by its name, as there is no other mark.

A trained tower keeps the inputs of its layers from forward to backward, as text does, and backward
computes each layer once more: its activations are those of one layer, whatever its depth.

Positions of several axes are those of the model's own `get_rope_index`, document by document.

Law (tests/engine/test_towers.py): loss and gradients are those of transformers' joint model, padded
and packed, with frozen and with trained towers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from megatrain.media import TOKEN_TYPES, MediaItem, MediaKind
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


@dataclass
class Features(ModelOutput):  # type: ignore[misc]  # its base has no types
    """What a merge reads of a tower's output."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    attention_mask: Any = None
    deepstack_features: Any = None


def find_towers(model: PreTrainedModel, training: MediaTraining) -> Towers:
    """Return the towers of a model, of which `training` is trained.

    Raises ConfigError if the model takes no media in a way that is known.
    """
    owners = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
        and any(_defines(module, name) for name in _FEATURES.values())
    ]
    if not owners:
        raise ConfigError(
            f"model.media is {training}: a {model.config.model_type} has no towers that are known. "
            "Set it to off, and train on text."
        )
    path, owner = owners[-1]  # a class around it hands on
    return Towers(
        owner=path,
        kinds=tuple(kind for kind, name in _FEATURES.items() if _defines(owner, name)),
    )


def is_projector(name: str) -> bool:
    """Return whether a param that text never reads belongs to a projector, by its name."""
    return _PROJECTOR.search(name) is not None


def _defines(module: nn.Module, name: str) -> bool:
    return callable(getattr(type(module), name, None))


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
    with attending_as_ever(), _layers_computed_again(model, towers):
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
        tensors = [one for one in tree_leaves((params, args, kwargs)) if isinstance(one, Tensor)]
        if not any(one.requires_grad for one in tensors):
            return own(*args, **kwargs)  # nothing goes back through a frozen tower

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
    joined = Features()
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
