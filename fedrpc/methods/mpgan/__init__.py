"""MP-GAN and its class-conditional variant."""
