"""``selfadapt`` and ``python -m selfadapt``: the command line, which takes seconds to load."""

import sys

from selfadapt.version import __version__


def main() -> None:
    """Run the command line; Ctrl-C exits without a traceback, also while modules are imported."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
        return
    try:
        from selfadapt.cli import main as run
    except KeyboardInterrupt:
        print("stopped; nothing was done yet", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
