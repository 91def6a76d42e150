"""DeepSpeed as the engine, ENGINE=deepspeed: its JSON (settings.py), our rules on its partitions, its checkpoints."""
