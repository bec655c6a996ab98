"""`python -m cuteflash` is the `cuteflash` command."""

from cuteflash.cli import main

if __name__ == "__main__":
    main()
