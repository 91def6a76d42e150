"""Fine-tuning and inference on BERT's weights: span prediction (SQuAD) and classification (GLUE),
without padding.
"""
