"""Create, save and load segmentation networks, and describe their input and output."""

from selfadapt.models.checkpoint import load_model, save_model
from selfadapt.models.create import create_model, open_model
from selfadapt.models.interface import Interface
from selfadapt.models.zoo import MODELS

__all__ = ["MODELS", "Interface", "create_model", "load_model", "open_model", "save_model"]
