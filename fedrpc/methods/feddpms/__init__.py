"""FedDPMS: one method, its two halves, its latent means, their privacy and their bytes."""
