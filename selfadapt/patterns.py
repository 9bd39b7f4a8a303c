"""Match names of modules and parameters with patterns.

``layer3`` matches every module of that name, at any depth, with all its submodules;
``backbone.layer3`` and ``decoder.*.conv`` are more specific. Patterns select the layers to adapt
and the layers of values of SaN's alpha.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Return True if a module that matches ``pattern`` has the dotted ``name``, or contains it.

    Example:
        >>> matches("backbone.layer3.0.conv1.weight", "layer3")
        True
        >>> matches("backbone.layer3.0.conv1.weight", "layer*.0")
        True
        >>> matches("backbone.layer30.weight", "layer3")
        False
    """
    forms = (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
    return any(fnmatchcase(name, form) for form in forms)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `` did you mean 'x'?`` for the choice closest to ``word``, or an empty string.

    Example:
        >>> nearest("offical", ["paper", "official"])
        " did you mean 'official'?"
    """
    close = get_close_matches(word, list(choices), n=1)
    return f" did you mean '{close[0]}'?" if close else ""


def alternatives(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: the closest choice, and all of them.

    Example:
        >>> "unknown mode 'offical'" + alternatives("offical", ["paper", "official"])
        "unknown mode 'offical'; did you mean 'official'? known: paper, official"
    """
    names = list(choices)
    return f";{nearest(word, names)} known: {', '.join(names)}"
