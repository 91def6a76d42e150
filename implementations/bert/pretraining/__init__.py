"""Masked-LM and next-sentence pretraining: one run from its settings to its end."""
