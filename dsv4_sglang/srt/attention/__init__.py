"""Attention backend, speculative decoding, prefill graphs and the collective operations of DP attention."""
