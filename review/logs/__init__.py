"""What a run leaves behind: its log, its folder, and what is said of them."""
