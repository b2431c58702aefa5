"""A run on Kubernetes: from a configuration and a number of clients to its manifests."""
