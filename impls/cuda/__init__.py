"""CUDA C++ kernels, compiled at first use by NVRTC, from pip packages alone. Where there is no GPU, a C++ compiler and a CPU twin of the device run them."""
