"""What it takes to try and to check the package without a released checkpoint: a tiny one, and its oracle."""
