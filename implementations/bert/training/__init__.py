"""The training loop and what it drives: step, graph, metrics, schedule, evaluation, the MLPerf
log.
"""
