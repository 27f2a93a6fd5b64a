"""The commands, one module each. They parse, call, print; what they call knows no terminal."""
