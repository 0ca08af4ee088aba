"""Plugin of SGLang: entry point, hooks, context of a server, and the checks of its flags, requests and parts.

The checks at start have no common entry, because each needs another stage of the start, in the launcher or in a
scheduler process: docs/design/architecture.md, "What happens at start".
"""
