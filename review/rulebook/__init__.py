"""The rules: the official checkers' own, the reference convergence points, statistics, the system description."""
