"""`python -m priory` is the command `priory`."""

from priory.cli import main

if __name__ == "__main__":
    main()
