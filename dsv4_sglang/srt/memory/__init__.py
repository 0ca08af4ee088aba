"""Memory pools of the server and their sizes."""
