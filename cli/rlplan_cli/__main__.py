"""`python -m rlplan_cli`: the same as `rlplan`, where the script is not on the path."""

from rlplan_cli.app import main

if __name__ == "__main__":
    main()
