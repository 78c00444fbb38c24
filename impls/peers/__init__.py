"""Thin adapters: other people's kernels behind the call of this project, each pinned, so that none can hand its work to another unseen."""
