"""Starts the processes of a run and keeps them running."""
