"""Parts for Penstock, as an example of a package that adds some."""
