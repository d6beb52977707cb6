"""``python -m plait``: the command line where the script ``plait`` is not on the path."""

from plait.cli import main

if __name__ == "__main__":
    main()
