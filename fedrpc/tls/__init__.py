"""Certificates, credentials and addresses of the two ends."""
