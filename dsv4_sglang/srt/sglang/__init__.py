"""Private names of SGLang, which no other package uses, in one module for each of its subsystems."""
