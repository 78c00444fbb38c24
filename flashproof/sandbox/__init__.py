"""Processes that run kernels: a kernel that crashes or hangs is one failed case, and the run goes on."""
