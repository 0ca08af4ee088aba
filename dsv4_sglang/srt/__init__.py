"""Integration with SGLang. docs/design/architecture.md lists its packages in the order of their imports."""
