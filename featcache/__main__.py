"""`python -m featcache`: the command line."""

from featcache.cli import main

if __name__ == "__main__":
    main()
