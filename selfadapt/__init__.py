"""Segmentation networks that adapt themselves to each image.

import selfadapt

method = selfadapt.SelfAdapt(model)      # any segmentation network
result = method(image)                   # path, PIL image, array or tensor
result.label                             # (H, W); the model is as it was
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from selfadapt.version import __version__

if TYPE_CHECKING:  # for type checkers
    from selfadapt.adapt import SelfAdapt as SelfAdapt
    from selfadapt.adapted import Adapted as Adapted
    from selfadapt.computed import Computed as Computed
    from selfadapt.dropout import add_dropout as add_dropout
    from selfadapt.engine import Fast as Fast
    from selfadapt.method import Method as Method
    from selfadapt.methods import METHODS as METHODS
    from selfadapt.methods import create_method as create_method
    from selfadapt.models import MODELS as MODELS
    from selfadapt.models import Interface as Interface
    from selfadapt.models import create_model as create_model
    from selfadapt.models import load_model as load_model
    from selfadapt.models import open_model as open_model
    from selfadapt.models import save_model as save_model
    from selfadapt.norm import apply_san as apply_san
    from selfadapt.norm import remove_san as remove_san
    from selfadapt.norm import san as san
    from selfadapt.predict import segment_scene as segment_scene
    from selfadapt.pseudo import fuse as fuse
    from selfadapt.pseudo import pseudo_label as pseudo_label
    from selfadapt.result import Result as Result
    from selfadapt.views import View as View
    from selfadapt.views import every_view as every_view
    from selfadapt.views import paper_views as paper_views

NAMES = {
    "adapt": ("SelfAdapt",),
    "adapted": ("Adapted",),
    "computed": ("Computed",),
    "dropout": ("add_dropout",),
    "engine": ("Fast",),
    "method": ("Method",),
    "methods": ("METHODS", "create_method"),
    "models": ("MODELS", "Interface", "create_model", "load_model", "open_model", "save_model"),
    "norm": ("apply_san", "remove_san", "san"),
    "predict": ("segment_scene",),
    "pseudo": ("fuse", "pseudo_label"),
    "result": ("Result",),
    "views": ("View", "every_view", "paper_views"),
}
"""Public names by module, which is imported when it is first used: torch takes seconds."""
HOMES = {name: module for module, names in NAMES.items() for name in names}

__all__ = ["__version__", *HOMES]


def __getattr__(name: str) -> Any:
    """Import one of the names above, or a module of this package."""
    if name in HOMES:
        value = getattr(import_module(f"selfadapt.{HOMES[name]}"), name)
        globals()[name] = value
        return value
    try:
        return import_module(f"selfadapt.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"selfadapt.{name}":
            raise
        raise AttributeError(f"module 'selfadapt' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return __all__
