"""The user's own code by address, ``MODULE:NAME``: methods, losses, step rules and networks."""

import os
import sys
from importlib import import_module
from typing import Any

from selfadapt.patterns import nearest


def is_own(name: object) -> bool:
    """Return True if a name is the address of the user's own code."""
    return isinstance(name, str) and ":" in name


def not_trusted(address: str) -> ValueError:
    """Return the error for own code that the user has not allowed to run."""
    return ValueError(
        f"{address} is code of your own that would be run; if you trust it, add --trust, in Python "
        "trust=True, or import it yourself"
    )


def import_own(address: str) -> Any:
    """Import an object of the user's own code, which runs the code of its module."""
    module_name, _, name = address.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{address}: {error}; is it on the Python path?") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(f"{address} failed: {type(error).__name__}: {error}") from error
    value = getattr(module, name, None)
    if not callable(value):
        names = [name for name, value in vars(module).items() if callable(value)]
        guess = nearest(name, names)
        raise ValueError(f"{module_name} has no function or class {name!r}{guess and ';'}{guess}")
    return value
