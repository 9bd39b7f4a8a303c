"""Networks: create them, save them, load them back, and talk to any of them."""

from selfadapt.models.checkpoint import load_model, save_model
from selfadapt.models.create import MODELS, create_model
from selfadapt.models.interface import Interface

__all__ = ["MODELS", "Interface", "create_model", "load_model", "save_model"]
