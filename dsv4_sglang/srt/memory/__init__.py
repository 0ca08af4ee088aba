"""Pools of the server and their sizes."""
