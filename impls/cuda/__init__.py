"""CUDA C++ kernels. NVRTC compiles them at first use, and needs only pip packages.

On a machine without a GPU, a CPU twin of the device runs the same sources. The host's C++ compiler compiles them.
"""
