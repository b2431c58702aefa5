"""FLea: one method, its two halves, its objective and its buffer."""
