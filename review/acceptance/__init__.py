"""The verdict on an acceptance test: its records, what stands out in them, and what was not
tested.
"""
