"""Attention backend, speculative decoding and prefill graphs."""
