"""Data sets, their preparation, and how they are partitioned among clients."""
