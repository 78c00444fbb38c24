"""Thin adapters that give the kernels of other projects the call of this project.

Each adapter pins one kernel, so that no kernel can silently pass its work to another.
"""
