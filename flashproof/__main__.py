"""`python -m flashproof`: the command `flashproof`."""

from flashproof.cli import main

main()
