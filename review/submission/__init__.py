"""The submission: system description and package."""
