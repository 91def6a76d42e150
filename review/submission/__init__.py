"""What is handed in: the system description and the package."""
