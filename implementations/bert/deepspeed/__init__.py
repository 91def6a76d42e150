"""ENGINE=deepspeed: DeepSpeed's JSON (settings.py), our rules on its partitions, its
checkpoints.
"""
