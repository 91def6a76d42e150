"""The acceptance test of certify.sh and certify.sub: its load, other tools, telemetry and its
record.
"""
