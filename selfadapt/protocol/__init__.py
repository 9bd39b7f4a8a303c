"""Evaluation by the paper's protocol: one model, several targets, settings tuned elsewhere."""

from selfadapt.protocol.evaluate import evaluate
from selfadapt.protocol.recipe import DomainConfig, EvaluateConfig, MethodConfig, NetworkConfig
from selfadapt.protocol.results import Results, read_results

__all__ = [
    "DomainConfig",
    "EvaluateConfig",
    "MethodConfig",
    "NetworkConfig",
    "Results",
    "evaluate",
    "read_results",
]
