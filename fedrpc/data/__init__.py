"""Data sets, their preparation, and how they are split among clients."""
