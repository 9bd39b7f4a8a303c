"""Which parts of a network a name pattern means.

``layer3`` means every module called ``layer3`` and all that is inside it, wherever it sits in the
tree; ``backbone.layer3`` and ``decoder.*.conv`` narrow it down. The same rule serves the layers to
adapt and SaN's alpha by layer.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Return True if the dotted ``name`` is, or lies inside, what ``pattern`` names.

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
    """Return `` did you mean 'x'?`` for the choice closest to ``word``, or nothing.

    Example:
        >>> nearest("offical", ["paper", "official"])
        " did you mean 'official'?"
    """
    close = get_close_matches(word, list(choices), n=1)
    return f" did you mean '{close[0]}'?" if close else ""
