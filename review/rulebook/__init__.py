"""The rules: official checkers, reference convergence points, system description, and rules of our
own.
"""
