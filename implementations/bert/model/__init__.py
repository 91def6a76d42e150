"""BERT of any size: embeddings, encoder and pretraining heads on a varlen batch."""
