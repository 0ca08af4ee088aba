"""Integration with SGLang: plugin, hooks, pools, sizing, attention backend, prefix cache, start-up check."""
