"""`python -m drumline` is `drumline`."""

from .cli import main

main()
