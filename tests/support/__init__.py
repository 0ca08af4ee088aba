"""Parts of the tests that several test files use."""
