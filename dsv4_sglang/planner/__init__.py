"""The capacity planner behind `dsv4-sglang plan`: what a server configuration would hold, computed without a GPU.

A server never imports this package. Weights are counted with SGLang's own model constructors on the meta device. The
cache is sized by the functions that size a server's pools. The capacity of SGLang's own cache comes from the pool
configurator of the installed release.
"""
