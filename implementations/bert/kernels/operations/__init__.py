"""The model's and the optimizer's operations: a Triton kernel beside its plain PyTorch
reference.
"""
