"""Step rules: how weights move against their gradients.

A step rule is a function of weights, their gradients and the learning rate that changes the weights
in place.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from selfadapt.own import is_own, not_trusted
from selfadapt.patterns import nearest

StepRule = Callable[[list[Tensor], list[Tensor], float], None]


def gradient_descent(weights: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Take a step of plain gradient descent.

    Example:
        >>> weight = torch.ones(2)
        >>> gradient_descent([weight], [torch.tensor([3.0, 4.0])], lr=0.1)
        >>> weight
        tensor([0.7000, 0.6000])
    """
    torch._foreach_add_(weights, gradients, alpha=-lr)


def fixed_length(weights: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Take a step of length ``lr`` over all weights together, however large the gradients are.

    Example:
        >>> weight = torch.ones(2)
        >>> fixed_length([weight], [torch.tensor([30.0, 40.0])], lr=0.1)
        >>> weight
        tensor([0.9400, 0.9200])
    """
    norms = [norm.float() for norm in torch._foreach_norm(gradients)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = -lr / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    torch._foreach_add_(weights, torch._foreach_mul(gradients, scale))


STEP_RULES: dict[str, StepRule] = {
    "gradient-descent": gradient_descent,
    "fixed-length": fixed_length,
}


def find_step_rule(step: str | StepRule) -> StepRule:
    """Return a step rule by its name in ``STEP_RULES``; a function stays as it is."""
    if isinstance(step, str):
        if step not in STEP_RULES:
            if is_own(step):
                raise not_trusted(step)
            guess = nearest(step, STEP_RULES)
            raise ValueError(f"unknown step rule {step!r};{guess} known: {', '.join(STEP_RULES)}")
        return STEP_RULES[step]
    if not callable(step):
        raise TypeError(
            f"step must be a name or a function of weights, gradients and lr, got {step!r}"
        )
    return step
