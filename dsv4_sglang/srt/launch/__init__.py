"""Launch of a server: options, command, environment, and the checks that need neither torch nor SGLang."""
