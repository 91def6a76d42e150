"""Ranking of results, the user's own among the published ones, with scaling and the trend over the
rounds.
"""
