"""The attention backend, speculation and prefill graphs."""
