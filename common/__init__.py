"""The ground floor: files, settings, processes, durations and YAML, without torch; every package
may import it.
"""
