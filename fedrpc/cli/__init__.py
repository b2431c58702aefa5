"""The three programs fedrpc, fedrpc-server and fedrpc-client: parse, call one function; no logic."""

from fedrpc.cli.main import app, client_app, client_main, main, server_app, server_main

__all__ = ["app", "client_app", "client_main", "main", "server_app", "server_main"]
