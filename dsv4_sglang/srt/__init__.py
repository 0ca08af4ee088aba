"""Everything that touches SGLang: plugin, hooks, pools, sizing, the attention backend, the start-up check."""
