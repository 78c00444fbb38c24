"""FlashAttention in plain PyTorch, on any device: the algorithms as text, to be read beside the papers.

Every product is a two-dimensional one of tiles that were copied to fresh memory, for one batch and one head at a time. Libraries choose how to sum a
product by its shape, by the number of products in a batch and by the alignment of the operands; here none of these depends on the batch or
on the caller's memory, which is what makes the results independent of both, bit for bit.
"""
