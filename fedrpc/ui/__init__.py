"""The live page: what runs do while they run, in a browser."""
