"""Training on a source domain, with checkpoint selection on a validation domain."""

from selfadapt.train.augment import AugmentConfig
from selfadapt.train.loop import train
from selfadapt.train.recipe import MachineConfig, ModelConfig, TrainConfig

__all__ = [
    "AugmentConfig",
    "MachineConfig",
    "ModelConfig",
    "TrainConfig",
    "train",
]
