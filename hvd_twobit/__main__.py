"""``python -m hvd_twobit``: the command ``hvd-twobit``."""

from .cli import main

main()
