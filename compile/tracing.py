"""Make a transformers model trace to canonical nodes for a while, and leave everything as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from .attention import normalise, rotate

NAME = "speceyes_export"
ROTATION = "apply_rotary_pos_emb"


@contextmanager
def traceable(model: nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Within it the modules of `model` attend with `attend`, and rotate and normalise with one node each."""
    with ExitStack() as stack:

        def swap(table: dict[str, Any], name: str, value: Any) -> None:
            stack.enter_context(_swapped(table, name, value))

        swap(AttentionInterface._global_mapping, NAME, attend)
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                swap(vars(module.config), "_attn_implementation_internal", NAME)
            if type(module).__name__.endswith("RMSNorm"):
                swap(module._parameters, "weight", _rms_scale(module))
            if (forward := _forward(module)) is not None:
                swap(vars(module), "forward", forward)
        for name in sorted({type(module).__module__ for module in model.modules()}):
            if name.startswith("transformers.models.") and hasattr(sys.modules[name], ROTATION):
                swap(vars(sys.modules[name]), ROTATION, rotate)
        yield


@contextmanager
def _swapped(table: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """`table[name]` is `value` within; afterwards it is what it was, or absent again."""
    before = {name: table[name]} if name in table else {}
    table[name] = value
    try:
        yield
    finally:
        del table[name]
        table.update(before)


def _forward(module: Any) -> Callable[[Tensor], Tensor] | None:
    """The same arithmetic in fewer nodes, or None where the module is best traced as it is."""
    if type(module).__name__.endswith("RMSNorm"):
        epsilon = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)
        return lambda states: normalise(states, module.weight, epsilon)
    if isinstance(module, Conv1D):
        return lambda states: torch.matmul(states, module.weight) + module.bias
    if isinstance(module, NewGELUActivation):
        return lambda states: nn.functional.gelu(states, approximate="tanh")
    return None


def _rms_scale(module: Any) -> nn.Parameter:
    """The factor after normalisation; Gemma stores its offset from one."""
    weight: nn.Parameter = module.weight
    offset = type(module).__name__.startswith("Gemma")
    return nn.Parameter(1.0 + weight.detach(), requires_grad=False) if offset else weight
