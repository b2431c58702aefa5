"""FedDPMS: messages, both halves, latent means, their privacy and their bytes."""
