"""``python -m ncclops``."""

from ncclops.cli import main

if __name__ == "__main__":
    main()
