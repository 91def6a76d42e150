"""Below all kernels: Triton, launch settings, arithmetic, random numbers, graph capture, gradient
buffers.
"""
