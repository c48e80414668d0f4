"""Measurements on a GPU; nothing here is imported by the package."""
