"""Model package that SGLang loads instead of its own DeepSeek-V4 when a server opts in."""
