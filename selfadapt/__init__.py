"""Segmentation networks that adapt themselves to each image.

import selfadapt

method = selfadapt.SelfAdapt(model)      # any segmentation network
result = method(image)                   # path, PIL image, array or tensor
result.label                             # (H, W); the model is as it was
"""

from selfadapt.adapt import SelfAdapt
from selfadapt.dropout import add_dropout
from selfadapt.fast import Fast
from selfadapt.methods import METHODS, create_method
from selfadapt.models import MODELS, Interface, create_model, load_model, open_model, save_model
from selfadapt.norm import apply_san, remove_san, san
from selfadapt.pseudo import fuse, pseudo_label
from selfadapt.result import Result
from selfadapt.version import __version__
from selfadapt.views import View, every_view, paper_views

__all__ = [
    "METHODS",
    "MODELS",
    "Fast",
    "Interface",
    "Result",
    "SelfAdapt",
    "View",
    "__version__",
    "add_dropout",
    "apply_san",
    "create_method",
    "create_model",
    "every_view",
    "fuse",
    "load_model",
    "open_model",
    "paper_views",
    "pseudo_label",
    "remove_san",
    "san",
    "save_model",
]
