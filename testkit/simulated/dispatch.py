"""Ops of a thread that has entered a stream: queued on it, or waiting for it, or the host's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from testkit.simulated.accelerator import Access, Region, Simulator

aten = torch.ops.aten
_FRESH = aten.lift_fresh.default
"""What torch.tensor(...) ends with: a view by its schema, though nothing on a device holds it."""
SYNCHRONIZING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every op of this thread to the simulator."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulator = simulator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._simulator.bypassed.depth or _is_view(func):
            return func(*args, **kwargs)
        return _Op(self._simulator, func, args, kwargs).run()


class _Op:
    """One op, and where its tensors lie."""

    def __init__(self, simulator: Simulator, func: Any, args: Any, kwargs: Any) -> None:
        self.simulator, self.func, self.args, self.kwargs = simulator, func, args, kwargs
        self.stream = simulator.current_stream()
        self.name = func._schema.name.removeprefix("aten::")
        self.tensors = _tensors_in((args, kwargs))
        with simulator.lock:
            self._regions = {id(tensor): simulator.region_of(tensor) for tensor in self.tensors}

    def run(self) -> Any:
        func, simulator = self.func, self.simulator
        device = self.kwargs.get("device")
        if (device is not None and torch.device(device).type == "meta") or any(
            tensor.is_meta for tensor in self.tensors
        ):
            return func(*self.args, **self.kwargs)
        kinds = [self._kind(tensor) for tensor in self.tensors]
        in_lane = self.stream is not simulator.default
        if func is _FRESH and kinds == [None] and in_lane:
            return self._given()
        if "device" not in kinds:
            if self.tensors or not in_lane:
                return self._on_host()
            return self._queued()
        if func is aten.copy_.default:
            return self._copied(*kinds)
        for tensor, kind in zip(self.tensors, kinds, strict=True):
            assert kind == "device" or tensor.dim() == 0, (
                f"{self.name}: a host tensor {tuple(tensor.shape)} meets device memory"
            )
        return self._asked() if self._asks() else self._queued()

    def _kind(self, tensor: Tensor) -> str | None:
        region = self._regions[id(tensor)]
        return None if region is None else region.kind

    def _on_host(self) -> Any:
        written = {id(tensor) for tensor in self._written()}
        for tensor in self.tensors:
            self.simulator.touch(tensor, writes=id(tensor) in written, what=self.name)
        return self.func(*self.args, **self.kwargs)

    def _given(self) -> Tensor:
        """torch.tensor(...) on a device: a copy from pageable memory, which the host waits for."""
        source = self.args[0]
        self.stream.synchronize()
        with self.simulator.lock, self.simulator.bypassed:
            target = self.simulator.allocate(source.shape, source.stride(), source.dtype)
            target.copy_(source)
        return target

    def _copied(self, target_kind: str | None, source_kind: str | None) -> Tensor:
        target: Tensor = self.args[0]
        source: Tensor = self.args[1]
        if target_kind == source_kind:
            self._queued()
            return target
        assert target.dtype is source.dtype, "a copy that changes the dtype on its way"
        host = source if target_kind == "device" else target
        blocks = not (len(self.args) > 2 and self.args[2]) and not self.kwargs.get("non_blocking")
        pageable = not self._is_pinned(host)
        self._queue(self._accesses([source]), self._accesses([target]))
        if (host.dim() > 0 and blocks) or pageable:
            self.stream.synchronize()
        return target

    def _is_pinned(self, host: Tensor) -> bool:
        if self._kind(host) == "pinned" or host.numel() == 0:
            return True
        return self.simulator.is_registered(host)

    def _asks(self) -> bool:
        if self.func in SYNCHRONIZING:
            return True
        return self.func in INDEXING and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in self.args[1]
        )

    def _asked(self) -> Any:
        """The host must know: all that is queued here is done first."""
        simulator = self.simulator
        simulator.launch(
            self.stream,
            self.name,
            self._accesses(self.tensors),
            self._accesses(self._written()),
            None,
        )
        self.stream.synchronize()

        def on_device(out: Tensor) -> Tensor:
            if simulator.kind_of(out) == "device":
                return out
            return simulator.allocate(out.shape, out.stride(), out.dtype).copy_(out)

        with simulator.lock, simulator.bypassed:
            return _mapped(on_device, self.func(*self.args, **self.kwargs))

    def _queued(self) -> Any:
        written = self._written()
        if written:
            self._queue(self._accesses(self.tensors), self._accesses(written))
            return written[0] if len(self.func._schema.returns) == 1 else tuple(written)
        outs = self._outputs()
        with self.simulator.lock:
            made = [(out, self.simulator.region_of(out)) for out in _tensors_in(outs)]
        if self.func not in EMPTY:
            self._queue(self._accesses(self.tensors), made, made)
        return outs

    def _queue(
        self, reads: list[Access], writes: list[Access], outs: Iterable[Access] = ()
    ) -> None:
        func, simulator = self.func, self.simulator
        with simulator.lock, simulator.bypassed:
            args, kwargs = _mapped(
                lambda tensor: _alias(tensor, self._regions[id(tensor)]), (self.args, self.kwargs)
            )
            aliases = [_alias(*out) for out in outs]
            state = _drawn_state(func, args, kwargs)

        def work() -> None:
            if state is not None:
                after = torch.get_rng_state()
                torch.set_rng_state(state)
            result = func(*args, **kwargs)
            if state is not None:
                torch.set_rng_state(after)
            if aliases:
                for alias, value in zip(aliases, _tensors_in(result), strict=True):
                    alias.copy_(value)

        simulator.launch(self.stream, self.name, reads, writes, work)

    def _accesses(self, tensors: Iterable[Tensor]) -> list[Access]:
        return [(tensor, self._regions[id(tensor)]) for tensor in tensors]

    def _written(self) -> list[Tensor]:
        found: list[Tensor] = []
        for number, name in _written_arguments(self.func):
            by_name = number is None or number >= len(self.args)
            found += _tensors_in(self.kwargs.get(name) if by_name else self.args[number])
        return found

    def _outputs(self) -> Any:
        """Return fresh memory in the form of the op's results."""
        with self.simulator.lock, self.simulator.bypassed:
            like = _results_like(self.func, self.args, self.kwargs)
            return _mapped(
                lambda out: self.simulator.allocate(out.shape, out.stride(), out.dtype), like
            )


def _alias(tensor: Tensor, region: Region | None) -> Tensor:
    """Return what queued work uses; a scalar of the host, or pageable memory, is read now."""
    return tensor.detach().clone() if region is None else region.alias(tensor)


_known: dict[Any, Any] = {}


def _results_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Return results of the right shapes, strides and dtypes.

    By trying it on other values: the meta device knows some results (of layer norm in bf16, say) in
    another dtype than the CPU makes them.
    """
    key = (func, _form_of((args, kwargs)))
    if key not in _known:
        tried_args, tried_kwargs = _mapped(_dummy, (args, kwargs))
        state = torch.get_rng_state()
        _known[key] = _mapped(
            lambda out: torch.empty_strided(
                out.shape, out.stride(), dtype=out.dtype, device="meta"
            ),
            func(*tried_args, **tried_kwargs),
        )
        torch.set_rng_state(state)
    return _known[key]


def _form_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _form_of(part)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_form_of, value))
    return type(value), value


def _drawn_state(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the generator's state for an op that draws, and let the generator go on as it will."""
    if not _draws(func):
        return None
    state = torch.get_rng_state()
    drawn_args, drawn_kwargs = _mapped(_dummy, (args, kwargs))
    func(*drawn_args, **drawn_kwargs)
    return state


def _dummy(value: Tensor) -> Tensor:
    """Return a tensor like `value` that is in range as an index and as a probability."""
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return fresh.fill_(0.5 if value.is_floating_point() else 0)


@functools.cache
def _draws(func: Any) -> bool:
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return (
        bool(returns)
        and func is not _FRESH
        and all(out.alias_info is not None and not out.alias_info.is_write for out in returns)
    )


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int | None, str]]:
    """Return place, if it has one, and name of each argument that an op writes."""
    return [
        (None if argument.kwarg_only else number, argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors_in(part)]


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with each tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(change, part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, part) for part in value)
    return value
