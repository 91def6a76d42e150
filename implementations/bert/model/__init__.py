"""BERT of any size: embeddings, encoder and pretraining heads on one varlen batch."""
