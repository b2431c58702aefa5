"""What two or more methods share."""
