"""`python -m fedrpc.cli` is `fedrpc`."""

from fedrpc.cli import main

main()
