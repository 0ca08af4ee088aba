"""Replacements of GPU code for a server on a CPU."""
