"""`python -m insitu` is the command `insitu`."""

from insitu.cli import main

if __name__ == "__main__":
    main()
