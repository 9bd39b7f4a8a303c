"""Training: from a source domain to a checkpoint, chosen on the validation domain."""

from selfadapt.train.augment import AugmentConfig
from selfadapt.train.loop import train
from selfadapt.train.recipe import MachineConfig, ModelConfig, TrainConfig, settings

__all__ = [
    "AugmentConfig",
    "MachineConfig",
    "ModelConfig",
    "TrainConfig",
    "settings",
    "train",
]
