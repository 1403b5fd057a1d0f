"""Muon in single precision: momentum, orthogonalised by Newton-Schulz iterations (Jordan et al., 2024)."""

from collections import defaultdict
from collections.abc import Iterable

import torch


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Matrices (count, rows, columns) with their singular values pulled towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """For the hidden matrices of a network; `lr` is the spectral size of a step."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update; matrices of one shape are orthogonalised together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                directions = orthogonalise(torch.stack([self._direction(p, group["momentum"]) for p in parameters]))
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)

    def _direction(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - momentum)
        result: torch.Tensor = gradient.lerp(state["momentum"], momentum)
        return result
