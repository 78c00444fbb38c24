"""Processes that run kernels. A kernel that crashes or hangs is one failed case, and the run continues."""
