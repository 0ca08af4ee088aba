"""Tools to try and to check the package without a released checkpoint: tiny random checkpoints and oracles for them."""
