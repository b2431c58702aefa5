"""Attacks on what a finished run has shared: decoders that rebuild inputs, a detector of a hidden mark, and controls.

Everything here works on tensors and knows no method and no run directory. A failing attack is evidence, no guarantee.
"""
