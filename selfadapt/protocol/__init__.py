"""Evaluation by the paper's protocol: several targets, one model, settings chosen elsewhere."""

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
