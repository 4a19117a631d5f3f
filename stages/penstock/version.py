"""The version of the package, apart from `penstock/__init__.py`, so that low layers can import it."""

__version__ = "0.1.0"
