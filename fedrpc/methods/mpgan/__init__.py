"""MP-GAN and its class-conditional variant: messages, the GAN phase, labelled images, and both halves."""
