"""`python -m torchax_core.cli`."""

from torchax_core.cli import main

if __name__ == "__main__":
    main()
