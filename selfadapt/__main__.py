"""``python -m selfadapt``."""

from selfadapt.cli import main

if __name__ == "__main__":
    main()
