"""What a CUDA device would be asked for, without one: its flash kernel on a CPU, and copies that stop the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spec_stack import devices

Shapes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As CUDA's kernel: heads that share keys, a causal mask that ends at the last key."""
    assert is_causal
    assert len({query.dtype, key.dtype, value.dtype}) == 1
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, 1).double() for each in (key, value))
    scores = query.double() @ keys.transpose(-1, -2) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + keys.shape[2] - query.shape[2])
    output = (scores.masked_fill(future, -torch.inf).softmax(-1) @ values).to(query.dtype)
    none = torch.empty(0)
    return output, none, none, none, 0, 0, none, none, none


@contextmanager
def flash_on_cpu() -> Iterator[Shapes]:
    """For the block, CPU tensors go to a flash kernel as a GPU's would; the shapes of its queries and keys."""
    shapes: Shapes = []

    def noting(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
        shapes.append((tuple(query.shape), tuple(key.shape)))
        return _flash(query, key, *rest, **options)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", noting, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "has_flash", lambda *_: True)
        yield shapes
    library._destroy()


@contextmanager
def blocking_copies() -> Iterator[list[str]]:
    """For the block, whatever copies from the CPU to another device in such a way that the host waits for it."""
    found: list[str] = []
    with _Made(found), _Copied(found):
        yield found


class _Copied(TorchDispatchMode):
    """Copies of tensors; an index on the CPU is copied where it is used."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, aten, on_host = kwargs or {}, torch.ops.aten, []
        if function is aten._to_copy.default and not kwargs.get("non_blocking"):
            on_host = [args[0]] if torch.device(kwargs.get("device") or "cpu").type != "cpu" else []
        elif function is aten.copy_.default and not (*args, False)[2]:
            on_host = [args[1]] if args[0].device.type != "cpu" else []
        elif function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            on_host = [index for index in args[1] if index is not None] if args[0].device.type != "cpu" else []
        self._found += [str(function) for each in on_host if each.device.type == "cpu"]
        return function(*args, **kwargs)


class _Made(TorchFunctionMode):
    """What Python hands over as numbers: `torch.tensor` on a device, and lists as indices."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            self._found.append("torch.tensor")
        elif function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].device.type != "cpu":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self._found += ["an index of numbers" for each in index if isinstance(each, list)]
        return function(*args, **kwargs)


@contextmanager
def read_backs() -> Iterator[list[str]]:
    """For the block, whatever reads a tensor's numbers into Python: on a GPU the host waits for it."""
    found: list[str] = []
    with _Read(found):
        yield found


class _Read(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__", "numpy"):
            self._found.append(name)
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Operators that run inside the block; on a GPU most of them are a launch. num_launches: all but the views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_launches = 0
        self.counts = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counts:
            self.names.append(str(function))
            aliases = [argument.alias_info for argument in function._schema.arguments]
            self.num_launches += all(alias is None or alias.is_write for alias in aliases)
        return function(*args, **(kwargs or {}))
