"""Measures of accuracy, fairness, features and exposure, as numbers from numbers."""
