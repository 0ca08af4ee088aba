"""Plugin of SGLang: entry point, hooks, context of a server, and the checks of its flags, requests and parts."""
