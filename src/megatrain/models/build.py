"""From a config to a decoder: the model on the meta device, cut into blocks.

    config --> skeleton on the meta device --> its layers --> the side of every other module

Buffers of the skeleton hold what `from_pretrained` would have put there. The model's own forward
shows what is before the layers and after them (probing/boundaries.py), and in a joint model
(multimodal.py) what text never reads: tensors that are carried from folder to folder, and have no
block.

While transformers builds a model it uses numbers of an untrusted config: how many modules it makes,
how large the tables are that it fills. Both are bounded here, before the ledger is asked.

Laws (tests/models/test_decoder.py, tests/models/test_families.py, tests/attacks)
    1. Every parameter belongs to exactly one block; a tied one to the block that reads it first.
       In a joint model it is in one block, or carried.
    2. Dtypes, ties and buffers equal those of `from_pretrained`.
    3. Whatever the config, the result is a model or a UnsupportedModel with the reason, soon and in
       little memory.
    4. A text ends where transformers' `generate` ends it (tests/models/test_ends.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from megatrain.errors import ConfigError, MissingPackage, UnsupportedModel, listing
from megatrain.models import optional
from megatrain.models.balance import find_balancing, has_own_balancing
from megatrain.models.classes import scores_texts
from megatrain.models.decoder import COMPUTE_DTYPES, Block, Decoder, Param
from megatrain.models.multimodal import attention_choice, joint_class, text_part
from megatrain.models.patterns import check_patterns, matches
from megatrain.models.probing.boundaries import find_head, find_layers, find_sides
from megatrain.step.ops import Role

if TYPE_CHECKING:
    from megatrain.models.adapters.lora import LoraConfig
    from megatrain.models.towers import MediaTraining

MAX_PARAMS = 1 << 14
"""A fused layer has up to 40; building takes 0.1 ms each."""
MAX_BUFFER_BYTES = 128 << 20
MAX_ALL_BUFFER_BYTES = 768 << 20
_PACKAGES = {"flash_attention_2": "flash-attn"}
"""The package that an attention implementation needs besides torch."""


def build_decoder(
    config: PreTrainedConfig,
    dtype: Literal["bf16", "fp32"],
    frozen: tuple[str, ...] = (),
    attn: str | None = None,
    lora: LoraConfig | None = None,
    media: MediaTraining = "off",
) -> Decoder:
    """Return the decoder that `config` describes; `frozen` are name patterns not to be trained.

    `attn` is an attention implementation of transformers (`sdpa`, `eager`, `flex_attention` ...);
    None lets it choose. With `lora` its adapters alone are trained. `media`: what is trained of the
    towers of a joint model (towers.py). Costs no memory for weights.
    Raises UnsupportedModel, MissingPackage, or ConfigError for a pattern that matches nothing.
    """
    asked = bool(getattr(text_part(config), "output_router_logits", False))
    if asked:  # stand-ins for layers have no routers; the engine collects their logits itself
        config = copy.deepcopy(config)
        text_part(config).output_router_logits = False
    model = build_skeleton(config, COMPUTE_DTYPES[dtype], attn)
    path, layers = find_layers(model)
    head_path = find_head(model)
    sides = find_sides(model, path, layers, head_path)
    adapters = None if lora is None else optional.lora.adapt_layers(model, path, lora)
    towers = None if media == "off" else optional.towers.find_towers(model, media)
    carried = sides.never if towers is None else []
    params = {name for name, _ in model.named_parameters()}
    of_towers = [] if towers is None else [name for name in sides.never if name in params]
    names: list[list[str]] = [[*sides.before, *of_towers]]
    names += [
        [f"{path}.{i}.{n}" for n, _ in layer.named_parameters()] for i, layer in enumerate(layers)
    ]
    names.append(sides.after)
    _refuse_shared(names)
    aliases = _aliases(model)
    owned = {name: aliases.get(name, ()) for block_names in names for name in block_names}
    check_patterns("model.frozen", frozen, {**owned, **dict.fromkeys(carried, ())})
    added, trained = frozenset[str](), set(owned)
    if adapters is not None:
        added = frozenset(filter(optional.lora.is_adapter, owned))
        trained &= added.union(adapters.saved)
    if media == "frozen":
        trained -= set(sides.never)
    elif media == "projector":
        trained -= {name for name in sides.never if not optional.towers.is_projector(name)}
    trained = {name for name in trained if not matches(name, frozen)}
    if not trained:
        raise ConfigError("model.frozen matches every parameter, so nothing would be trained.")
    roles = (Role.EMBEDDING, *(Role.LAYER for _ in layers), Role.HEAD)
    blocks = tuple(
        Block(
            index=index,
            role=role,
            params=tuple(_param(model, name, aliases, trained, added) for name in block_names),
        )
        for index, (role, block_names) in enumerate(zip(roles, names, strict=True))
    )
    return Decoder(
        model=model,
        blocks=blocks,
        layers_path=path,
        num_layer_outputs=sides.num_outputs,
        head_path=head_path,
        balancing=find_balancing(model, path, head_path, sides.num_outputs),
        adapters=adapters,
        asks_balancing=asked and has_own_balancing(model, path),
        carried=tuple(_carried_param(model, name, aliases) for name in carried),
        eos_token_ids=named_ends(config),
        looked_up=sides.looked_up,
        towers=towers,
    )


def _refuse_shared(names: list[list[str]]) -> None:
    flat = [name for block in names for name in block]
    if len(flat) != len(set(flat)):
        shared = {name for name in flat if flat.count(name) > 1}
        raise UnsupportedModel(f"blocks share parameters: {listing(shared)}")


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter's first name, its other names."""
    first: dict[int, str] = {id(param): name for name, param in model.named_parameters()}
    others: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first[id(param)]
        if name != owner:
            others[owner] = (*others.get(owner, ()), name)
    return others


def _param(
    model: nn.Module,
    name: str,
    aliases: dict[str, tuple[str, ...]],
    trained: set[str],
    added: frozenset[str],
) -> Param:
    tensor = model.get_parameter(name)
    if tensor.dtype not in COMPUTE_DTYPES.values():
        raise UnsupportedModel(
            f"parameter {name} is {tensor.dtype}; only bf16 and fp32 can be trained"
        )
    return Param(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        aliases=aliases.get(name, ()),
        trained=name in trained,
        is_adapter=name in added,
    )


def _carried_param(model: PreTrainedModel, name: str, aliases: dict[str, tuple[str, ...]]) -> Param:
    tensor = model.state_dict(keep_vars=True)[name]
    return Param(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        aliases=aliases.get(name, ()),
        trained=False,
    )


def named_ends(
    config: PreTrainedConfig, generation: Mapping[str, Any] | None = None
) -> frozenset[int]:
    """Return the ends of generation_config.json, or those of config.json if it names none."""
    named = (generation or {}).get("eos_token_id")
    if named is None:
        ends_of = (getattr(part, "eos_token_id", None) for part in (config, text_part(config)))
        named = next((end for end in ends_of if end is not None), None)
    return frozenset(
        end for end in (named if isinstance(named, list) else [named]) if type(end) is int
    )


def build_skeleton(
    config: PreTrainedConfig, dtype: torch.dtype, attn: str | None
) -> PreTrainedModel:
    """Return the model with parameters on meta and buffers as `from_pretrained` leaves them."""
    try:
        with torch.device("meta"), _few_params():
            model = _built(config, dtype, attention_choice(config, attn))
        _apply_dtype_plan(model, dtype)
        _make_buffers(model)
    except UnsupportedModel:
        raise
    except ImportError as error:
        if attn is None and joint_class(config) is not None:
            raise MissingPackage(
                f"transformers cannot build a {config.model_type}: {str(error).strip()[:300]}"
            ) from error
        if attn is None:
            raise
        package = _PACKAGES.get(attn, attn)
        raise MissingPackage(
            f"model.attn is {attn}, but the package {package} does not work here: "
            f"{str(error)[:300]} Install {package}, or set model.attn to auto"
        ) from error
    except Exception as error:  # a config may pass every check and still not build
        raise UnsupportedModel(
            f"transformers cannot build a {config.model_type} from this config: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # It looks at the tokens only to warn of padding: on a device the host waits for that.
            module.warn_if_padding_and_no_attention_mask = _say_nothing
    return model.train()


def _built(config: PreTrainedConfig, dtype: torch.dtype, attn: Any) -> PreTrainedModel:
    joint = joint_class(config)
    if joint is not None:
        made: PreTrainedModel = joint._from_config(config, dtype=dtype, attn_implementation=attn)
        return made
    kind = AutoModelForSequenceClassification if scores_texts(config) else AutoModelForCausalLM
    return kind.from_config(config, dtype=dtype, attn_implementation=attn)


def _say_nothing(*_: object) -> None:
    pass


@contextmanager
def _few_params() -> Iterator[None]:
    """Stop a model that is being built when it has more params than any model we could hold."""
    num_params = 0

    def count(module: nn.Module, name: str, param: nn.Parameter) -> None:
        nonlocal num_params
        num_params += 1
        if num_params > MAX_PARAMS:
            raise UnsupportedModel(
                f"config.json describes a model of more than {MAX_PARAMS} params ({name} in "
                f"{type(module).__name__} is the next), too many for a model"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _make_buffers(model: PreTrainedModel) -> None:
    """Put real buffers in place of those on meta, with the values of a fresh model."""
    sizes = [buffer.nbytes for buffer in model.buffers()]
    if max(sizes, default=0) > MAX_BUFFER_BYTES or sum(sizes) > MAX_ALL_BUFFER_BYTES:
        raise UnsupportedModel(
            f"{model.config.model_type}: config.json requests tables and masks of "
            f"{sum(sizes) >> 20} MiB, {max(sizes) >> 20} MiB for the largest; the limits are "
            f"{MAX_ALL_BUFFER_BYTES >> 20} and {MAX_BUFFER_BYTES >> 20} MiB. They grow "
            "with the number of positions."
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        # Only buffers are wanted: for weights transformers would compute values as large as they.
        module._is_hf_initialized = next(module.buffers(), None) is None
    for param in model.parameters():
        param._is_hf_initialized = True
    # Since 5.0 every model recomputes its buffers when it is initialized.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.initialize_weights()


def _apply_dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give fp32 to what the model keeps in fp32 whatever it is loaded in (routers, decay rates)."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern = re.compile("|".join(f"(?:{glob.replace('*', '.*')})" for glob in plan))
    replaced: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and pattern.search(f"{prefix}.{name}"):
                new = replaced.setdefault(id(param), nn.Parameter(param.detach().float()))
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and buffer.is_floating_point()
                and pattern.search(f"{prefix}.{name}")
            ):
                module._buffers[name] = buffer.float()
