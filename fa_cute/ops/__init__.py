"""Building blocks that kernels of several architectures share."""
