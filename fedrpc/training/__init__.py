"""Local training: the loop, the losses, DP-SGD."""
