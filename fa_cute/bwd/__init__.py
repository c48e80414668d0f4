"""The gradient of attention, one sub-package per architecture."""
