"""Integrity audit: every slot and block of the pools has exactly one owner, and tree, registry and locks agree. See
docs/design/integrity.md."""
