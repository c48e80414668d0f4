"""Blackwell backward: a CTA owns a block of keys and walks over the query blocks that see it."""
