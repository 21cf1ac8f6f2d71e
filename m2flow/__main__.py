"""`python -m m2flow`: the command line."""

from m2flow.cli import main

if __name__ == "__main__":
    main()
