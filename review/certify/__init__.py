"""Which rank or node is slow, and does a machine pass its acceptance test?"""
