"""The words of a command, spelled as the parser takes them."""

from pathlib import Path

from selfadapt.cli.opening import switches

TRUE, FALSE = ("true", "yes"), ("false", "no")


def spelled(words: list[str]) -> list[str]:
    """Spell out what may be said in several ways.

    Settings from a file come first, so that what is given beside it counts, wherever it stands. A
    switch takes no word: what follows it may be an image. ``--fast false`` and ``--fast=false`` are
    understood as ``--no-fast`` all the same.

    Example:
        >>> spelled(["predict", "a.png", "--config", "my.yaml", "--fast", "false", "b.png"])
        ['predict', '--config', 'my.yaml', 'a.png', '--no-fast', 'b.png']
    """
    if not words or words[0] != "predict":
        return words
    first, rest = [], []
    left = words[1:]
    while left:
        word, *left = left
        if word == "--":
            rest += [word, *left]
            break
        if word == "--config" and left:
            first += [word, _text(left.pop(0))]
        elif word.startswith("--config="):
            first += ["--config", _text(word.partition("=")[2])]
        else:
            word, left = _switch(word, left)
            rest.append(word)
    return [words[0], *first, *rest]


def _text(file: str) -> str:
    """Return the name of a file of settings, if it may be one."""
    try:
        if Path(file).is_file():
            Path(file).read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"settings must be a YAML file, but {file} is no text") from error
    return file


def _switch(word: str, left: list[str]) -> tuple[str, list[str]]:
    """Return a switch with its value in one word, and the words after it."""
    flag, equals, value = word.partition("=")
    if flag not in switches():
        return word, left
    if not equals and left and left[0].lower() in TRUE + FALSE and not Path(left[0]).exists():
        value, *left = left
    if value.lower() in FALSE:
        return flag.replace("--", "--no-", 1), left
    return (flag if not value or value.lower() in TRUE else word), left
