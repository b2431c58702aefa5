"""Links and devices that a run pretends to have."""
