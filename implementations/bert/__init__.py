"""Packed-sequence PyTorch trainer of MLPerf Training BERT."""
