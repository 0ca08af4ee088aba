"""What ties the package to SGLang: plugin, hooks, release differences, options and validation."""
