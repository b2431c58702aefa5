"""Opens finished runs and computes: attacks, inversions, audits."""
