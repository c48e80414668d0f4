"""Forward kernels, one package per architecture; they share only `args`."""
