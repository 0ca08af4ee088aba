"""Tiny random checkpoints and a self-test, to try and check the package without a released checkpoint."""
