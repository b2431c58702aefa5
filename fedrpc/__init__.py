"""fedrpc: a federated-learning simulator over real gRPC, with every byte on a ledger."""

__version__ = "0.1.0"
