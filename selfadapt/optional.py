"""Import of optional libraries, and their error messages."""

import re
from importlib import import_module
from types import ModuleType

PROTECTIONS = re.compile(
    "trust_remote_code|weights_only|safe_globals|allow_pickle|MAX_IMAGE_PIXELS|"
    "LOAD_TRUNCATED_IMAGES|unsafe_|import_path_allowlist"
)
"""Options of libraries that protect against code execution and memory exhaustion."""


def import_optional(module: str, extra: str) -> ModuleType:
    """Import an optional library; raise ModuleNotFoundError with the command to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this needs the library {module}, which is not installed; "
            f"install it with: pip install 'selfadapt[{extra}]'"
        ) from error


def without_unsafe_advice(message: str) -> str:
    """Remove the sentences about disabling a protection from a message of a library.

    Example:
        >>> without_unsafe_advice("a.pt holds code. Pass weights_only=False to run it.")
        'a.pt holds code.'
    """
    if not PROTECTIONS.search(message):
        return message
    sentences = re.split(r"(?<=[.!?])\s+|\n", message)
    return " ".join(s for s in sentences if s and not PROTECTIONS.search(s))
