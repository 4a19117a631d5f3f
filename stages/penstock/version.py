"""The version of the package, in a module of its own that low layers can import."""

__version__ = "0.3.0"
