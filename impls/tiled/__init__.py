"""FlashAttention in plain PyTorch, on any device. Read these algorithms together with the papers.

Every product is a two-dimensional product of tiles, for one batch entry and one head. The tiles are copies in fresh
memory. A library chooses the order of a sum by the shape of the product, by the number of products in a batch and by
the alignment of the operands. Here, none of these depends on the batch or on the caller's memory. So the results are
independent of both, bit for bit.
"""
