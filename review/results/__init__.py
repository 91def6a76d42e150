"""What the logs amount to: runs, their score, their power, where a live one stands."""
