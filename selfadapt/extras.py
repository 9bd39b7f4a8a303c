"""Libraries that only some networks need."""

from importlib import import_module
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """Return an optional library, or say how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this needs the library {module}, which is not installed; "
            f"install it with: pip install 'selfadapt[{extra}]'"
        ) from error
