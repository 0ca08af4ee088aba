"""Everything that touches SGLang: the plugin, its hooks, pools, sizing, the attention backend and the start-up check."""
