"""The model package that SGLang loads in place of its own DeepSeek-V4 when a launch opts in."""
