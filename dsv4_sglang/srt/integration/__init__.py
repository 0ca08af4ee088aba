"""Plugin of SGLang: hooks, differences between releases, options and validation."""
