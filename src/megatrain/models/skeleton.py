"""The skeleton: a Hugging Face model with parameters on the meta device and real buffers.

What transformers does while it builds a model uses numbers of an untrusted config: how many modules
it makes, how large the tables are that it fills. Both are bounded here, before the ledger is asked.

Laws (tests/models/test_families.py, tests/attacks)
    1. Dtypes and buffers equal those of `from_pretrained`.
    2. Whatever the config, the result is a model or a NotSplittable, soon and in little memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megatrain.errors import MissingPackage, NotSplittable
from megatrain.models.multimodal import attention_choice, joint_class

MAX_PARAMS = 1 << 14
"""A fused layer has up to 40; building takes 0.1 ms each."""
MAX_BUFFER_BYTES = 128 << 20
MAX_ALL_BUFFER_BYTES = 768 << 20
_PACKAGES = {"flash_attention_2": "flash-attn"}
"""What an attention implementation needs besides torch."""


def build_skeleton(
    config: PreTrainedConfig, dtype: torch.dtype, attn: str | None
) -> PreTrainedModel:
    """Return the model with parameters on meta and buffers as `from_pretrained` leaves them."""
    try:
        with torch.device("meta"), _few_params():
            model = _built(config, dtype, attention_choice(config, attn))
        _apply_dtype_plan(model, dtype)
        _make_buffers(model)
    except NotSplittable:
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
        raise NotSplittable(
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
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn)


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
            raise NotSplittable(
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
        raise NotSplittable(
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
    # Since 5.0 every model recomputes its buffers when it is initialised.
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
