"""The acceptance test of certify.sh and certify.sub: its load, its record and the verdict on it."""
