"""The three programs fedrpc, fedrpc-server and fedrpc-client."""

from fedrpc.cli.main import client_main, main, server_main

__all__ = ["client_main", "main", "server_main"]
