"""Flower's side of the echo benches; run by Flower's own Python, which has neither torch nor fedrpc."""
