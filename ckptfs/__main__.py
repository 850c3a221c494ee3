"""`python -m ckptfs` is the `ckptfs` command."""

from .cli.main import main

main()
